#include "kvbm/frame_fold.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "arrays.hpp"
#include "frames.hpp"
#include "kvbm/history.hpp"
#include "kvbm/scan.hpp"
#include "python.hpp"

namespace kvbm::bindings {
namespace {

// The Python classes of a fold's results. Made once at import, immutable; GIL held.
struct FoldClasses {
  SharedClasses frames = frame_classes();
  nb::module_ fold = nb::module_::import_("kvbm.core.fold");
  nb::object scanned = nb::module_::import_("kvbm.core.codec").attr("ScannedFrame");
  nb::object folded = fold.attr("FoldedFrame");
  nb::object tier_blocks = fold.attr("TierBlocks");
  nb::object pool = nb::module_::import_("kvbm.core.events").attr("PoolStated");
  nb::object reach = nb::module_::import_("kvbm.core.ids").attr("Reach");
  nb::object frame_error = nb::module_::import_("kvbm.core.errors").attr("FrameError");
  nb::module_ stays = nb::module_::import_("kvbm.core.stays");
  nb::object stay_row = stays.attr("STAY_ROW");
  nb::object tier_row = stays.attr("TIER_STATE_ROW");
  nb::object stay_state = stays.attr("StayState");
  nb::object number = nb::module_::import_("numpy").attr("dtype")("<u4");
};

WireInteger wire_integer(nb::handle value) {
  int overflow = 0;
  const long long narrow = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0 && narrow == -1 && PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  if (overflow == 0) {
    return WireInteger::negative(narrow);
  }
  const unsigned long long wide = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred() != nullptr) {
    throw nb::python_error();
  }
  return WireInteger(wide);
}

nb::object python_integer(const WireInteger& value) {
  return value.is_negative() ? nb::object(nb::int_(static_cast<std::int64_t>(value.bits()))) : nb::int_(value.bits());
}

EpochStart epoch_start(nb::handle event) {
  EpochStart start{.epoch = wire_integer(event.attr("epoch")), .pools = {}};
  for (nb::handle pool : event.attr("pools")) {
    start.pools.push_back({.tier = static_cast<Tier>(nb::cast<std::uint8_t>(nb::int_(pool.attr("tier")))),
                           .slots = wire_integer(pool.attr("slots")),
                           .block_bytes = wire_integer(pool.attr("block_bytes")),
                           .reach = static_cast<Reach>(nb::cast<std::uint8_t>(nb::int_(pool.attr("reach")))),
                           .name = nb::cast<std::string>(pool.attr("name"))});
  }
  return start;
}

nb::list python_anomalies(const std::vector<Anomaly>& anomalies) {
  nb::list made;
  for (const Anomaly& anomaly : anomalies) {
    made.append(nb::make_tuple(python_text(anomaly.rule), anomaly.detail));
  }
  return made;
}

nb::list evolve(FrameFold& fold, nb::handle event, const FoldClasses& classes) {
  Keepers keepers;
  const Event view = event_of(event, *classes.frames, keepers);
  std::optional<EpochStart> start;
  if (std::holds_alternative<InstanceStarted>(view)) {
    start = epoch_start(event);
  }
  FoldDelta delta;
  fold.evolve(view, start ? &*start : nullptr, delta);
  return python_anomalies(delta.anomalies);
}

// A frame that was read through, with its starts decoded.
struct ReadFrame {
  FrameReader reader;
  ScannedFrame scanned;
  std::vector<EpochStart> starts;
};

ReadFrame read_frame(Bytes data, std::size_t at, const FoldClasses& classes) {
  const FrameReader reader(data, at);
  std::vector<EpochStart> starts;
  std::vector<nb::object> epochs;
  std::vector<Bytes> blobs;
  const auto decode_starts = [&] {
    for (const Bytes& blob : blobs) {
      const nb::object start = decode_started(*classes.frames, blob, at);
      starts.push_back(epoch_start(start));
      epochs.push_back(start.attr("epoch"));
    }
  };
  ScannedFrame scanned;
  try {
    scanned = scan_frame(reader, at, blobs);
  } catch (const Error&) {
    decode_starts();  // a fault in a start before it is told first
    throw;
  }
  decode_starts();
  for (const nb::object& epoch : epochs) {
    check_epoch(scanned, epoch);
  }
  return {reader, scanned, std::move(starts)};
}

nb::object evolve_frame(FrameFold& fold, nb::handle data, std::size_t at, std::uint32_t first,
                        const FoldClasses& classes, const ErrorClasses& errors) {
  const BufferView view(data);
  const ReadFrame frame = read_frame(view.bytes(), at, classes);
  const FoldedFrame folded = fold.evolve_frame(frame.reader, first, frame.starts);
  nb::object illegal = nb::none();
  if (folded.illegal) {
    illegal = errors.made(Error::illegal_event(folded.illegal->rule, folded.illegal->detail));
  }
  const FoldDelta& delta = folded.delta;
  return named_tuple(classes.folded, python_scanned(classes.scanned, frame.scanned), folded.folded,
                     python_anomalies(delta.anomalies), illegal,
                     nb::make_tuple(delta.added, delta.withdrawn, delta.claimed, delta.unclaimed));
}

void evolve_history(History& history, nb::handle data, std::size_t at, const FoldClasses& classes) {
  const BufferView view(data);
  const ReadFrame frame = read_frame(view.bytes(), at, classes);
  history.evolve_frame(frame.reader, frame.starts);
}

nb::object namespace_ids(const History& history) {
  const std::vector<NamespaceId>& ids = history.namespace_ids();
  nb::list made;
  for (const NamespaceId& id : ids) {
    made.append(copy_bytes(id));
  }
  return nb::tuple(made);
}

nb::object names(const History& history) {
  nb::list made;
  for (const std::string& name : history.names()) {
    made.append(nb::str(name.data(), name.size()));
  }
  return nb::tuple(made);
}

nb::object history_state(const History& history, const FoldClasses& classes) {
  return named_tuple(classes.stay_state, python_integer(history.epoch()),
                     records_over(history.tier_states(), classes.tier_row), namespace_ids(history), names(history),
                     records_over(history.lasting(), classes.stay_row),
                     records_over(history.lasting_snapshots(), classes.number));
}

// The rows of an array of records, copied: who gives them may have them in a file. Throws Error: kLayout.
template <class Row>
std::vector<Row> rows_of(nb::handle records) {
  const BufferView view(records);
  const Bytes bytes = view.bytes();
  if (bytes.size() % sizeof(Row) != 0) {
    throw Error(ErrorCode::kLayout, "an array has rows of another size");
  }
  std::vector<Row> rows(bytes.size() / sizeof(Row));
  if (!rows.empty()) {
    std::memcpy(rows.data(), bytes.data(), bytes.size());
  }
  return rows;
}

void resume_history(History& history, nb::handle state) {
  std::vector<NamespaceId> ids;
  for (const nb::handle id : state.attr("namespaces")) {
    const BufferView view(id);
    if (view.bytes().size() != std::tuple_size_v<NamespaceId>) {
      throw Error(ErrorCode::kLayout, "a namespace's id has another size");
    }
    std::copy(view.bytes().begin(), view.bytes().end(), ids.emplace_back().begin());
  }
  std::vector<std::string> names;
  for (const nb::handle name : state.attr("names")) {
    names.push_back(nb::cast<std::string>(name));
  }
  history.resume(wire_integer(state.attr("epoch")), rows_of<TierStateRow>(state.attr("tiers").attr("tobytes")()), ids,
                 names, rows_of<StayRow>(state.attr("lasting").attr("view")("u1")),
                 rows_of<std::uint32_t>(state.attr("snapshots").attr("view")("u1")));
}

nb::dict pools(const FrameFold& fold, const FoldClasses& classes) {
  nb::dict made;
  for (const PoolStated& pool : fold.pools()) {
    const nb::object& tier = python_tier(*classes.frames, pool.tier);
    made[tier] = classes.pool(tier, python_integer(pool.slots), python_integer(pool.block_bytes),
                              classes.reach(static_cast<std::uint8_t>(pool.reach)), pool.name);
  }
  return made;
}

nb::object blocks(const FrameFold& fold, Tier tier, const FoldClasses& classes) {
  const std::vector<Residency> held = fold.held(tier);
  const nb::bytes hashes = new_bytes(held.size() * kHashBytes);
  const nb::bytes slots = new_bytes(held.size() * sizeof(std::int64_t));
  std::uint8_t* hash = writable(hashes).data();
  std::uint8_t* slot = writable(slots).data();
  nb::list runs;
  for (std::size_t begin = 0, end = 0; end < held.size(); ++end) {
    const Residency& one = held[end];
    const std::int64_t number = ResidencyTable::has_slot(one) ? std::int64_t{one.slot} : -1;
    hash = std::copy(one.hash.begin(), one.hash.end(), hash);
    std::memcpy(slot, &number, sizeof number);
    slot += sizeof number;
    const NamespaceId& id = fold.namespace_id(one);
    if (end + 1 == held.size() || fold.namespace_id(held[end + 1]) != id) {
      runs.append(nb::make_tuple(copy_bytes(id), end + 1 - begin));
      begin = end + 1;
    }
  }
  return named_tuple(classes.tier_blocks, hashes, slots, runs);
}

Tier tier_of(nb::handle tier) {
  const auto value = nb::cast<std::uint8_t>(nb::int_(tier));
  if (value >= kTierCount) {
    throw nb::value_error("no such tier");
  }
  return static_cast<Tier>(value);
}

}  // namespace

void bind_frame_fold(nb::module_& module, const SharedErrors& errors) {
  const auto classes = std::make_shared<const FoldClasses>();
  nb::class_<FrameFold>(module, "Residencies", "What one instance holds, by tier. As kvbm.core.fold.Residencies.")
      .def(nb::init<bool>(), nb::arg("strict") = true)
      .def_rw("strict", &FrameFold::strict)
      .def_prop_ro("epoch", [](const FrameFold& fold) { return python_integer(fold.epoch()); })
      .def_prop_ro("stopped", [](const FrameFold& fold) { return fold.is_stopped(); })
      .def_prop_ro("digest", [](const FrameFold& fold) { return fold.digest(); })
      .def_prop_ro("pools", [classes](const FrameFold& fold) { return pools(fold, *classes); })
      .def_prop_ro("memory_bytes", &FrameFold::memory_bytes)
      .def(
          "evolve",
          [errors, classes](FrameFold& fold, nb::handle event) {
            return translated(errors, [&] { return evolve(fold, event, *classes); });
          },
          nb::arg("event"))
      .def(
          "evolve_frame",
          [errors, classes](FrameFold& fold, nb::handle data, std::size_t at, std::uint32_t first) {
            return translated(errors, [&] { return evolve_frame(fold, data, at, first, *classes, *errors); });
          },
          nb::arg("data"), nb::arg("at") = 0, nb::arg("first") = 0)
      .def(
          "count",
          [](const FrameFold& fold, nb::handle tier) {
            return tier.is_none() ? fold.count() : fold.count(tier_of(tier));
          },
          nb::arg("tier").none() = nb::none())
      .def(
          "blocks", [classes](const FrameFold& fold, nb::handle tier) { return blocks(fold, tier_of(tier), *classes); },
          nb::arg("tier"))
      .def(
          "tier_digest", [](const FrameFold& fold, nb::handle tier) { return fold.tier_digest(tier_of(tier)); },
          nb::arg("tier"))
      .def(
          "is_whole", [](const FrameFold& fold, nb::handle tier) { return fold.is_whole(tier_of(tier)); },
          nb::arg("tier"))
      .def(
          "is_cluster", [](const FrameFold& fold, nb::handle tier) { return fold.is_cluster(tier_of(tier)); },
          nb::arg("tier"))
      .def("miss_events", [](FrameFold& fold) { fold.miss_events(); })
      .def(
          "begin_blind",
          [](FrameFold& fold, nb::handle epoch) {
            FoldDelta delta;
            fold.begin_blind(wire_integer(epoch), delta);
          },
          nb::arg("epoch"));
  nb::class_<History>(module, "StayHistory", "Since when each block was held. As kvbm.reference.history.StayHistory.")
      .def(nb::init<>())
      .def(
          "evolve_frame",
          [errors, classes](History& history, nb::handle data, std::size_t at) {
            translated(errors, [&] { evolve_history(history, data, at, *classes); });
          },
          nb::arg("data"), nb::arg("at") = 0)
      .def("miss_events", &History::miss_events)
      .def("take_ended", [classes](History& history) { return records_over(history.take_ended(), classes->stay_row); })
      .def("lasting", [classes](const History& history) { return records_over(history.lasting(), classes->stay_row); })
      .def("state", [classes](const History& history) { return history_state(history, *classes); })
      .def(
          "resume",
          [errors](History& history, nb::handle state) { translated(errors, [&] { resume_history(history, state); }); },
          nb::arg("state"))
      .def("count", &History::count)
      .def_prop_ro("namespaces", &namespace_ids)
      .def_prop_ro("names", &names);
}

}  // namespace kvbm::bindings
