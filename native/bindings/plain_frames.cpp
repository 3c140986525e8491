#include "plain_frames.hpp"

#include <string>
#include <string_view>

namespace kvbm::bindings {

PlainClasses::PlainClasses()
    : frames_(frame_classes()),
      applied_(nb::module_::import_("kvbm.catalog.index.cluster_index").attr("PlainApplied")),
      reached_(nb::module_::import_("kvbm.catalog.index.cluster_index").attr("PlaceReached")),
      said_(nb::module_::import_("kvbm.catalog.index.cluster_index").attr("PlainClaims")),
      claims_(nb::module_::import_("kvbm.catalog.index.cluster_index").attr("Claims")) {}

nb::object PlainClasses::made(const PlainApplied& applied, const std::vector<StreamPlace>& places) const {
  nb::list reached;
  for (const StreamPlace& place : places) {
    reached.append(named_tuple(reached_, place.offset, place.digest, place.wall_time_ns, place.last, place.frames));
  }
  nb::list said;
  for (const PlainClaims& one : applied.claims) {
    const nb::object claims =
        named_tuple(claims_, python_tier(*frames_, one.run.tier), copy_bytes(one.run.namespace_id),
                    copy_bytes(one.run.hashes), one.run.is_withdrawn);
    said.append(named_tuple(said_, one.message, one.wall_time_ns, claims));
  }
  const nb::object diverged = applied.is_diverged ? nb::object(nb::int_(applied.end)) : nb::none();
  return named_tuple(applied_, applied.messages, diverged, applied.frames, applied.events, applied.blocks, reached,
                     said);
}

PlainRun::PlainRun(const ClusterIndex& index, const nb::list& messages, const nb::list& places) : kept_(messages) {
  for (const nb::handle place : places) {
    const auto name = nb::cast<std::string>(place[0]);
    this->places.push_back(
        {index.find_instance(name), name, nb::cast<std::uint64_t>(place[1]), nb::cast<std::uint64_t>(place[2])});
  }
  this->messages.reserve(messages.size());
  for (const nb::handle message : messages) {
    const auto place = nb::cast<std::size_t>(message[0]);
    const nb::object data = message[1];
    if (place >= places.size() || !nb::isinstance<nb::bytes>(data)) {
      throw Error(ErrorCode::kLayout, "a message is the number of a place, and bytes");
    }
    this->messages.push_back({place, bytes_of(data.ptr())});
  }
}

void PythonApplyThread::begin(const nb::list& messages, const nb::list& places) {
  if (run_ != nullptr) {
    throw Error(ErrorCode::kLayout, "a run is under way");
  }
  auto run = std::make_unique<PlainRun>(index_, messages, places);
  thread_.begin(run->messages, run->places);
  run_ = std::move(run);
}

nb::object PythonApplyThread::finish() {
  PlainApplied applied;
  {
    const GilReleased released;
    applied = thread_.finish();
  }
  const std::unique_ptr<PlainRun> run = std::move(run_);
  return classes_.made(applied, run->places);
}

void PythonApplyThread::close() {
  const GilReleased released;
  thread_.close();
}

void bind_plain_frames(nb::module_& module, const SharedErrors& errors) {
  using Self = PythonApplyThread;
  nb::class_<Self>(module, "ApplyThread",
                   "A thread that applies runs of plain frames, made by `ClusterIndex.apply_thread`.")
      .def("fileno", &Self::fileno)
      .def(
          "begin",
          [errors](Self& self, const nb::list& messages, const nb::list& places) {
            translated(errors, [&] { self.begin(messages, places); });
          },
          nb::arg("messages"), nb::arg("places"))
      .def("finish", [errors](Self& self) { return translated(errors, [&] { return self.finish(); }); })
      .def("close", &Self::close);
}

}  // namespace kvbm::bindings
