#include "kvbm/codec.hpp"

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "frames.hpp"
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

// Where a class keeps a field inside its objects, in bytes; -1 when it does not say, as to the stable API never.
Py_ssize_t offset_of([[maybe_unused]] nb::handle kind, [[maybe_unused]] const nb::object& field) {
#if defined(Py_LIMITED_API)
  return -1;
#else
  const nb::object descriptor = attribute(kind, field);
  if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type) {
    return -1;
  }
  const PyMemberDef* const member = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member;
  return member->type == T_OBJECT_EX ? member->offset : -1;
#endif
}

// A msgspec struct: made from keyword arguments without a dictionary, and read without a search for its attributes.
template <std::size_t kFields>
class StructClass {
 public:
  StructClass(const nb::module_& module, const char* name, const std::array<const char*, kFields>& fields)
      : kind_(module.attr(name)) {
    nb::list names;
    for (std::size_t index = 0; index < kFields; ++index) {
      names.append(interned(fields[index]));
      offsets_[index] = offset_of(kind_, names[index]);
    }
    names_ = nb::tuple(names);
  }

  std::array<nb::object, kFields> fields(nb::handle object) const {
    const bool is_ours = is_type_of(object);
    std::array<nb::object, kFields> values;
    for (std::size_t index = 0; index < kFields; ++index) {
      PyObject* value = nullptr;
      if (is_ours && offsets_[index] >= 0) {
        std::memcpy(&value, reinterpret_cast<const char*>(object.ptr()) + offsets_[index], sizeof value);
      }
      values[index] = value != nullptr ? nb::borrow(value) : attribute(object, names_[index]);
    }
    return values;
  }

  template <class... Values>
  nb::object operator()(const Values&... values) const {
    static_assert(sizeof...(values) == kFields);
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
  nb::object kind_;                               // the class
  nb::tuple names_;                               // its fields, in the order values are given and returned
  std::array<Py_ssize_t, kFields> offsets_ = {};  // where each lies in an object, or -1
};

}  // namespace

// The Python classes and attribute names of frames. Made once at import, immutable; GIL held.
struct FrameClasses {
  nb::module_ events = nb::module_::import_("kvbm.core.events");
  nb::module_ codec = nb::module_::import_("kvbm.core.codec");
  nb::module_ ids = nb::module_::import_("kvbm.core.ids");

  EnumClass tier{ids, "Tier"};
  EnumClass evict_reason{events, "EvictReason"};
  EnumClass migrate_cause{events, "MigrateCause"};
  EnumClass stop_reason{events, "StopReason"};

  StructClass<0> started{events, "InstanceStarted", {}};
  StructClass<6> created{events, "BlocksCreated", {{"namespace", "tier", "hashes", "slots", "parent", "start"}}};
  StructClass<7> migrated{
      events, "BlocksMigrated", {{"namespace", "source", "target", "kept", "cause", "hashes", "slots"}}};
  StructClass<4> evicted{events, "BlocksEvicted", {{"namespace", "tier", "reason", "hashes"}}};
  StructClass<5> listed{events, "ResidenciesListed", {{"namespace", "tier", "snapshot", "hashes", "slots"}}};
  StructClass<3> snapshot_ended{events, "SnapshotEnded", {{"tier", "snapshot", "count"}}};
  StructClass<1> stopped{events, "InstanceStopped", {{"reason"}}};
  StructClass<0> usage{events, "UsageRecorded", {}};
  StructClass<6> frame{codec, "Frame", {{"instance", "epoch", "first_offset", "wall_time_ns", "digest", "events"}}};

  nb::object encode_started = codec.attr("encode_started");
  nb::object decode_started = codec.attr("decode_started");
  nb::object encode_usage = codec.attr("encode_usage");
  nb::object decode_usage = codec.attr("decode_usage");
  nb::object no_parent = ids.attr("NO_PARENT");
  nb::object no_slots = nb::bytes("", 0);
};

SharedClasses frame_classes() { return std::make_shared<const FrameClasses>(); }

nb::object python_text(std::string_view text) { return nb::str(text.data(), text.size()); }

const nb::object& python_tier(const FrameClasses& classes, Tier tier) { return classes.tier(tier); }

nb::object decode_started(const FrameClasses& classes, Bytes blob, std::uint64_t at) {
  return classes.decode_started(copy_bytes(blob), at);
}

nb::object decode_usage(const FrameClasses& classes, Bytes report, std::uint64_t at) {
  return classes.decode_usage(copy_bytes(report), at);
}

// -- Python → C++ -----------------------------------------------------------------------------------------------------

Event event_of(nb::handle event, const FrameClasses& classes, Keepers& keepers) {
  const auto bytes = [&](nb::object& value) { return kept_bytes(std::move(value), keepers); };
  const auto namespace_of = [](const nb::object& value) { return sixteen(value, "a namespace id"); };
  if (classes.created.is_type_of(event)) {
    auto [namespace_id, tier, hashes, slots, parent, start] = classes.created.fields(event);
    return BlocksCreated{.namespace_id = namespace_of(namespace_id),
                         .tier = code<Tier>(tier),
                         .start = number<std::uint32_t>(start),
                         .parent = sixteen(parent, "a parent hash"),
                         .hashes = bytes(hashes),
                         .slots = bytes(slots)};
  }
  if (classes.migrated.is_type_of(event)) {
    auto [namespace_id, source, target, kept, cause, hashes, slots] = classes.migrated.fields(event);
    BlocksMigrated migrated{.namespace_id = namespace_of(namespace_id),
                            .source = Tier::kHbm,
                            .target = code<Tier>(target),
                            .kept = is_true(kept),
                            .cause = code<MigrateCause>(cause),
                            .hashes = bytes(hashes),
                            .slots = bytes(slots)};
    if (classes.tier.has(source)) {
      migrated.source = code<Tier>(source);
    } else {
      migrated.source = utf8(source, "a source instance's name");
      keepers.push_back(std::move(source));
    }
    return migrated;
  }
  if (classes.evicted.is_type_of(event)) {
    auto [namespace_id, tier, reason, hashes] = classes.evicted.fields(event);
    return BlocksEvicted{.namespace_id = namespace_of(namespace_id),
                         .tier = code<Tier>(tier),
                         .reason = code<EvictReason>(reason),
                         .hashes = bytes(hashes)};
  }
  if (classes.listed.is_type_of(event)) {
    auto [namespace_id, tier, snapshot, hashes, slots] = classes.listed.fields(event);
    return ResidenciesListed{.namespace_id = namespace_of(namespace_id),
                             .tier = code<Tier>(tier),
                             .snapshot = number<std::uint32_t>(snapshot),
                             .hashes = bytes(hashes),
                             .slots = bytes(slots)};
  }
  if (classes.snapshot_ended.is_type_of(event)) {
    const auto [tier, snapshot, count] = classes.snapshot_ended.fields(event);
    return SnapshotEnded{
        .tier = code<Tier>(tier), .snapshot = number<std::uint32_t>(snapshot), .count = number<std::uint32_t>(count)};
  }
  if (classes.stopped.is_type_of(event)) {
    const auto [reason] = classes.stopped.fields(event);
    return InstanceStopped{.reason = code<StopReason>(reason)};
  }
  if (classes.started.is_type_of(event)) {
    return InstanceStarted{.blob = kept_bytes(classes.encode_started(event), keepers)};
  }
  if (classes.usage.is_type_of(event)) {
    return UsageRecorded{.report = kept_bytes(classes.encode_usage(event), keepers)};
  }
  throw nb::type_error("a frame holds events of kvbm.core.events only");
}

namespace {

nb::bytes encode(nb::handle frame, const FrameClasses& classes) {
  const auto [name, epoch, first_offset, wall_time_ns, digest, events] = classes.frame.fields(frame);
  FrameHeader header;
  header.instance = utf8(name, "the instance's name");
  header.epoch = number<std::uint64_t>(epoch);
  header.first_offset = number<std::uint64_t>(first_offset);
  header.wall_time_ns = number<std::uint64_t>(wall_time_ns);
  header.digest = number<std::uint64_t>(digest);
  const std::size_t event_count = nb::len_hint(events);
  FrameWriter writer(header, event_count);
  Keepers keepers;
  keepers.reserve(2 * event_count);  // the hashes and slots of each
  for (nb::handle event : events) {
    writer.add(event_of(event, classes, keepers));
  }
  const std::size_t size = writer.frame_bytes();
  const nb::bytes data = new_bytes(size);
  {
    std::optional<GilReleased> released;
    if (size > kReleaseGilBytes) {
      released.emplace();
    }
    writer.write(writable(data));
  }
  return data;
}

// -- C++ → Python -----------------------------------------------------------------------------------------------------

// Makes the Python events of one frame.
class EventMaker {
 public:
  EventMaker(const FrameClasses& classes, std::uint64_t at) : classes_(classes), at_(at) {}

  nb::object operator()(const InstanceStarted& event) { return decode_started(classes_, event.blob, at_); }

  nb::object operator()(const BlocksCreated& event) {
    const nb::object parent = event.parent == kNoParent ? classes_.no_parent : copy_bytes(event.parent);
    return classes_.created(id(event.namespace_id), classes_.tier(event.tier), copy_bytes(event.hashes),
                            slots(event.slots), parent, nb::int_(event.start));
  }

  nb::object operator()(const BlocksMigrated& event) {
    const auto* const instance = std::get_if<std::string_view>(&event.source);
    const nb::object source =
        instance != nullptr ? python_text(*instance) : classes_.tier(std::get<Tier>(event.source));
    return classes_.migrated(id(event.namespace_id), source, classes_.tier(event.target), nb::bool_(event.kept),
                             classes_.migrate_cause(event.cause), copy_bytes(event.hashes), slots(event.slots));
  }

  nb::object operator()(const BlocksEvicted& event) {
    return classes_.evicted(id(event.namespace_id), classes_.tier(event.tier), classes_.evict_reason(event.reason),
                            copy_bytes(event.hashes));
  }

  nb::object operator()(const ResidenciesListed& event) {
    return classes_.listed(id(event.namespace_id), classes_.tier(event.tier), nb::int_(event.snapshot),
                           copy_bytes(event.hashes), slots(event.slots));
  }

  nb::object operator()(const SnapshotEnded& event) {
    return classes_.snapshot_ended(classes_.tier(event.tier), nb::int_(event.snapshot), nb::int_(event.count));
  }

  nb::object operator()(const InstanceStopped& event) { return classes_.stopped(classes_.stop_reason(event.reason)); }

  nb::object operator()(const UsageRecorded& event) { return decode_usage(classes_, event.report, at_); }

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
    std::optional<GilReleased> released;
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
  const SharedClasses classes = frame_classes();
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
