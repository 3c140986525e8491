#include "kvbm/told_tiers.hpp"

#include <algorithm>
#include <string>

#include "kvbm/entropy.hpp"
#include "kvbm/words.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

// The bytes of an object that has to be bytes. Throws Error: kLayout.
Bytes checked_bytes(PyObject* object, const char* what) {
  const auto bytes = bytes_if(object);
  if (!bytes) {
    throw Error(ErrorCode::kLayout,
                words(what, " is ", nb::str(nb::handle(object).type().attr("__name__")).c_str(), ", not bytes"));
  }
  return *bytes;
}

// What `views` then has is kept by `digests`.
void view_digests(nb::handle digests, std::size_t most, std::vector<Bytes>& views) {
  const bool is_list = PyList_Check(digests.ptr()) != 0;
  if (!is_list && !PyTuple_Check(digests.ptr())) {
    throw Error(ErrorCode::kLayout,
                words("digests are ", nb::str(digests.type().attr("__name__")).c_str(), "; give a list or tuple"));
  }
  views.resize(std::min(most, static_cast<std::size_t>(length_of(digests.ptr(), is_list))));
  for (std::size_t at = 0; at < views.size(); ++at) {
    views[at] = checked_bytes(item_of(digests.ptr(), is_list, static_cast<Py_ssize_t>(at)), "a digest");
    if (views[at].size() > ToldTiers::kMostDigestBytes) {
      throw Error(ErrorCode::kLayout,
                  words("a digest has ", views[at].size(), " bytes; at most ", ToldTiers::kMostDigestBytes));
    }
  }
}

nb::object learn(ToldTiers& blocks, nb::handle hashes, nb::handle digests, nb::handle group) {
  const Bytes packed = checked_bytes(hashes.ptr(), "hashes");
  if (packed.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout, words(packed.size(), " bytes of hashes; a hash has ", kHashBytes));
  }
  std::vector<Bytes> views;
  view_digests(digests, packed.size() / kHashBytes, views);
  const auto found = blocks.learn(packed.first(views.size() * kHashBytes), views, number<std::uint8_t>(group));
  return found ? nb::object(nb::make_tuple(found->run, found->begin, found->end)) : nb::none();
}

nb::bytes due(ToldTiers& blocks) {
  const nb::bytes made = new_bytes(blocks.choose_due() * kHashBytes);
  blocks.copy_due(writable(made));
  return made;
}

nb::tuple changed(ToldTiers& blocks, nb::handle given) {
  const Bytes tiers = checked_bytes(given.ptr(), "tiers");
  if (tiers.size() != blocks.due()) {
    throw Error(ErrorCode::kLayout, words(tiers.size(), " tiers for ", blocks.due(), " blocks that were due"));
  }
  for (const std::uint8_t tier : tiers) {
    if (tier != ToldTiers::kAbsent && (tier == 0 || tier >= kTierCount)) {
      throw Error(ErrorCode::kLayout, words(unsigned{tier}, " is no tier colder than HBM"));
    }
  }
  std::vector<ToldTiers::Told> told;
  std::vector<std::uint64_t> ended;
  blocks.change(tiers, told, ended);
  nb::list events;
  for (const ToldTiers::Told& one : told) {
    events.append(nb::make_tuple(one.run, one.begin, one.end, one.tier, one.is_held));
  }
  nb::list runs;
  for (const std::uint64_t run : ended) {
    runs.append(run);
  }
  return nb::make_tuple(events, runs);
}

}  // namespace

void bind_told_tiers(nb::module_& module, const SharedErrors& errors) {
  nb::class_<ToldTiers>(module, "ToldTiers")
      .def(
          "__init__", [](ToldTiers* self, std::uint32_t step) { new (self) ToldTiers(step, random_word()); },
          nb::arg("step"))
      .def_prop_ro("blocks", &ToldTiers::blocks)
      .def_prop_ro("digests", &ToldTiers::digests)
      .def(
          "learn",
          [errors](ToldTiers& self, nb::handle hashes, nb::handle digests, nb::handle group) {
            return translated(errors, [&] { return learn(self, hashes, digests, group); });
          },
          nb::arg("hashes"), nb::arg("digests"), nb::arg("group"))
      .def("tell_anew", &ToldTiers::tell_anew)
      .def("due", &due)
      .def(
          "changed",
          [errors](ToldTiers& self, nb::handle tiers) {
            return translated(errors, [&] { return changed(self, tiers); });
          },
          nb::arg("tiers"));
}

}  // namespace kvbm::bindings
