#include "kvbm/codec.hpp"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

// An interned attribute name, made once.
nb::object interned(const char* name) {
  PyObject* const text = PyUnicode_InternFromString(name);
  if (text == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(text);
}

nb::object attribute(nb::handle object, const nb::object& name) {
  PyObject* const value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(value);
}

// A msgspec struct made from keyword arguments, in a fixed order, without a dictionary.
class StructClass {
 public:
  StructClass(const nb::module_& module, const char* name, std::initializer_list<const char*> fields)
      : kind_(module.attr(name)) {
    nb::list names;
    for (const char* const field : fields) {
      names.append(interned(field));
    }
    names_ = nb::tuple(names);
  }

  template <class... Values>
  nb::object operator()(const Values&... values) const {
    PyObject* const arguments[] = {values.ptr()...};
    PyObject* const made = PyObject_Vectorcall(kind_.ptr(), arguments, 0, names_.ptr());
    if (made == nullptr) {
      throw nb::python_error();
    }
    return nb::steal(made);
  }

  bool is_type_of(nb::handle object) const noexcept {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == kind_.ptr();
  }

 private:
  nb::object kind_;  // the class
  nb::tuple names_;  // its fields, in the order values are given
};

nb::object python_text(std::string_view text) { return nb::str(text.data(), text.size()); }

// The Python classes and attribute names of frames. Made once at import, immutable; GIL held.
struct FrameClasses {
  nb::module_ events = nb::module_::import_("kvbm.core.events");
  nb::module_ codec = nb::module_::import_("kvbm.core.codec");
  nb::module_ ids = nb::module_::import_("kvbm.core.ids");

  EnumClass tier{ids, "Tier"};
  EnumClass evict_reason{events, "EvictReason"};
  EnumClass migrate_cause{events, "MigrateCause"};
  EnumClass stop_reason{events, "StopReason"};

  StructClass started{events, "InstanceStarted", {}};
  StructClass created{events, "BlocksCreated", {"namespace", "tier", "hashes", "slots", "parent", "start"}};
  StructClass migrated{events, "BlocksMigrated", {"namespace", "source", "target", "kept", "cause", "hashes", "slots"}};
  StructClass evicted{events, "BlocksEvicted", {"namespace", "tier", "reason", "hashes"}};
  StructClass stated{events, "ResidenciesStated", {"namespace", "tier", "round", "hashes", "slots"}};
  StructClass round_ended{events, "RoundEnded", {"tier", "round", "count"}};
  StructClass stopped{events, "InstanceStopped", {"reason"}};
  StructClass frame{codec, "Frame", {"instance", "epoch", "first_offset", "wall_time_ns", "digest", "events"}};

  nb::object encode_started = codec.attr("encode_started");
  nb::object decode_started = codec.attr("decode_started");
  nb::object no_parent = ids.attr("NO_PARENT");
  nb::object no_slots = nb::bytes("", 0);

  // One for each attribute that is read.
  nb::object a_namespace = interned("namespace"), a_tier = interned("tier"), a_hashes = interned("hashes");
  nb::object a_slots = interned("slots"), a_parent = interned("parent"), a_start = interned("start");
  nb::object a_source = interned("source"), a_target = interned("target"), a_kept = interned("kept");
  nb::object a_cause = interned("cause"), a_reason = interned("reason"), a_round = interned("round");
  nb::object a_count = interned("count"), a_instance = interned("instance"), a_epoch = interned("epoch");
  nb::object a_first_offset = interned("first_offset"), a_wall_time_ns = interned("wall_time_ns");
  nb::object a_digest = interned("digest"), a_events = interned("events");
};

using SharedClasses = std::shared_ptr<const FrameClasses>;

// -- Python → C++ ------------------------------------------------------------------------------------------------------

Event event_of(nb::handle event, const FrameClasses& classes, Keepers& keepers) {
  const auto get = [&](const nb::object& name) { return attribute(event, name); };
  const auto bytes = [&](const nb::object& name) { return kept_bytes(get(name), keepers); };
  const auto namespace_id = [&] { return sixteen(get(classes.a_namespace), "a namespace id", keepers); };
  if (classes.created.is_type_of(event)) {
    return BlocksCreated{.namespace_id = namespace_id(),
                         .tier = code<Tier>(get(classes.a_tier)),
                         .start = number<std::uint32_t>(get(classes.a_start)),
                         .parent = sixteen(get(classes.a_parent), "a parent hash", keepers),
                         .hashes = bytes(classes.a_hashes),
                         .slots = bytes(classes.a_slots)};
  }
  if (classes.migrated.is_type_of(event)) {
    BlocksMigrated migrated{.namespace_id = namespace_id(),
                            .source = Tier::kHbm,
                            .target = code<Tier>(get(classes.a_target)),
                            .kept = is_true(get(classes.a_kept)),
                            .cause = code<MigrateCause>(get(classes.a_cause)),
                            .hashes = bytes(classes.a_hashes),
                            .slots = bytes(classes.a_slots)};
    nb::object source = get(classes.a_source);
    if (classes.tier.has(source)) {
      migrated.source = code<Tier>(source);
    } else {
      migrated.source = utf8(source, "a source instance's name");
      keepers.push_back(std::move(source));
    }
    return migrated;
  }
  if (classes.evicted.is_type_of(event)) {
    return BlocksEvicted{.namespace_id = namespace_id(),
                         .tier = code<Tier>(get(classes.a_tier)),
                         .reason = code<EvictReason>(get(classes.a_reason)),
                         .hashes = bytes(classes.a_hashes)};
  }
  if (classes.stated.is_type_of(event)) {
    return ResidenciesStated{.namespace_id = namespace_id(),
                             .tier = code<Tier>(get(classes.a_tier)),
                             .round = number<std::uint32_t>(get(classes.a_round)),
                             .hashes = bytes(classes.a_hashes),
                             .slots = bytes(classes.a_slots)};
  }
  if (classes.round_ended.is_type_of(event)) {
    return RoundEnded{.tier = code<Tier>(get(classes.a_tier)),
                      .round = number<std::uint32_t>(get(classes.a_round)),
                      .count = number<std::uint32_t>(get(classes.a_count))};
  }
  if (classes.stopped.is_type_of(event)) {
    return InstanceStopped{.reason = code<StopReason>(get(classes.a_reason))};
  }
  if (classes.started.is_type_of(event)) {
    return InstanceStarted{.blob = kept_bytes(classes.encode_started(event), keepers)};
  }
  throw nb::type_error("a frame holds events of kvbm.core.events only");
}

nb::bytes encode(nb::handle frame, const FrameClasses& classes) {
  const nb::object name = attribute(frame, classes.a_instance);
  const nb::object events = attribute(frame, classes.a_events);
  FrameHeader header;
  header.instance = utf8(name, "the instance's name");
  header.epoch = number<std::uint64_t>(attribute(frame, classes.a_epoch));
  header.first_offset = number<std::uint64_t>(attribute(frame, classes.a_first_offset));
  header.wall_time_ns = number<std::uint64_t>(attribute(frame, classes.a_wall_time_ns));
  header.digest = number<std::uint64_t>(attribute(frame, classes.a_digest));
  FrameWriter writer(header);
  Keepers keepers;
  for (nb::handle event : events) {
    writer.add(event_of(event, classes, keepers));
  }
  const std::size_t size = writer.frame_bytes();
  const nb::bytes data = new_bytes(size);
  std::optional<nb::gil_scoped_release> released;
  if (size > kReleaseGilBytes) {
    released.emplace();
  }
  writer.write(writable(data));
  return data;
}

// -- C++ → Python ------------------------------------------------------------------------------------------------------

// Makes the Python events of one frame.
class EventMaker {
 public:
  EventMaker(const FrameClasses& classes, std::uint64_t at) : classes_(classes), at_(at) {}

  nb::object operator()(const InstanceStarted& event) { return classes_.decode_started(copy_bytes(event.blob), at_); }

  nb::object operator()(const BlocksCreated& event) {
    const nb::object parent = event.parent == kNoParent ? classes_.no_parent : copy_bytes(event.parent);
    return classes_.created(id(event.namespace_id), classes_.tier(event.tier), copy_bytes(event.hashes), slots(event.slots),
                            parent, nb::int_(event.start));
  }

  nb::object operator()(const BlocksMigrated& event) {
    const auto* const instance = std::get_if<std::string_view>(&event.source);
    const nb::object source = instance != nullptr ? python_text(*instance) : classes_.tier(std::get<Tier>(event.source));
    return classes_.migrated(id(event.namespace_id), source, classes_.tier(event.target), nb::bool_(event.kept),
                             classes_.migrate_cause(event.cause), copy_bytes(event.hashes), slots(event.slots));
  }

  nb::object operator()(const BlocksEvicted& event) {
    return classes_.evicted(id(event.namespace_id), classes_.tier(event.tier), classes_.evict_reason(event.reason),
                            copy_bytes(event.hashes));
  }

  nb::object operator()(const ResidenciesStated& event) {
    return classes_.stated(id(event.namespace_id), classes_.tier(event.tier), nb::int_(event.round),
                           copy_bytes(event.hashes), slots(event.slots));
  }

  nb::object operator()(const RoundEnded& event) {
    return classes_.round_ended(classes_.tier(event.tier), nb::int_(event.round), nb::int_(event.count));
  }

  nb::object operator()(const InstanceStopped& event) { return classes_.stopped(classes_.stop_reason(event.reason)); }

 private:
  // Most frames have one namespace, so its bytes object is shared by the events that follow each other.
  const nb::object& id(const NamespaceId& id) {
    if (!id_.is_valid() || id != last_) {
      last_ = id;
      id_ = copy_bytes(id);
    }
    return id_;
  }

  nb::object slots(Bytes slots) const { return slots.empty() ? classes_.no_slots : copy_bytes(slots); }

  const FrameClasses& classes_;  // what events are made of
  std::uint64_t at_;             // where the frame lies, for errors
  NamespaceId last_{};           // the namespace of the event before
  nb::object id_;                // the same as a Python object
};

nb::object decode(Bytes data, std::size_t at, const FrameClasses& classes) {
  std::optional<FrameReader> reader;
  {
    std::optional<nb::gil_scoped_release> released;
    if (data.size() - std::min(at, data.size()) > kReleaseGilBytes) {
      released.emplace();
    }
    reader.emplace(data, at);
  }
  nb::list events;
  EventMaker make(classes, at);
  while (const std::optional<Event> event = reader->next()) {
    events.append(std::visit(make, *event));
  }
  const FrameHeader& header = reader->header();
  const nb::object frame =
      classes.frame(python_text(header.instance), nb::int_(header.epoch), nb::int_(header.first_offset),
                    nb::int_(header.wall_time_ns), nb::int_(header.digest), nb::tuple(events));
  return nb::make_tuple(frame, reader->end());
}

}  // namespace

void bind_codec(nb::module_& module, const SharedErrors& errors) {
  const auto classes = std::make_shared<const FrameClasses>();
  module.def(
      "encode_frame",
      [errors, classes](nb::handle frame) { return translated(errors, [&] { return encode(frame, *classes); }); },
      nb::arg("frame"), "A frame's bytes. Raises LayoutError as kvbm.core.codec.encode_frame.");
  module.def(
      "decode_frame",
      [errors, classes](nb::handle data, std::size_t at) {
        return translated(errors, [&] { return decode(BufferView(data).bytes(), at, *classes); });
      },
      nb::arg("data"), nb::arg("at") = 0,
      "The frame at a position, and the position after it. Raises as kvbm.core.codec.decode_frame.");
}

}  // namespace kvbm::bindings
