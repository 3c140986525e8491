// What the bindings of frames, scans and folds share: Python's events, read and written. GIL held throughout.
#pragma once

#include <memory>
#include <string_view>

#include "kvbm/scan.hpp"
#include "python.hpp"

namespace kvbm::bindings {

struct FrameClasses;
using SharedClasses = std::shared_ptr<const FrameClasses>;

// The Python classes and attribute names of frames. Made at import; immutable.
SharedClasses frame_classes();

nb::object python_text(std::string_view text);

// A NamedTuple of a class from all its values. The tuple's own constructor spares a call into Python for each frame.
template <class... Values>
nb::object named_tuple(const nb::object& kind, const Values&... values) {
  const nb::tuple arguments = nb::make_tuple(nb::make_tuple(values...));
  PyObject* const made = tuple_from(kind, arguments);
  if (made == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(made);
}
const nb::object& python_tier(const FrameClasses& classes, Tier tier);

// A Python event as a view; `keepers` keep its bytes. Throws Error: kLayout, when it does not fit a frame.
Event event_of(nb::handle event, const FrameClasses& classes, Keepers& keepers);

// The InstanceStarted of a frame at a position. Raises MalformedFrameError.
nb::object decode_started(const FrameClasses& classes, Bytes blob, std::uint64_t at);

// The UsageRecorded of a frame at a position. Raises MalformedFrameError.
nb::object decode_usage(const FrameClasses& classes, Bytes report, std::uint64_t at);

// Notes the flaw of a frame whose InstanceStarted is of another epoch than it, unless it has one already.
void check_epoch(ScannedFrame& frame, const nb::object& epoch);

// A ScannedFrame of kvbm.core.codec. `kind` is that class.
nb::object python_scanned(const nb::object& kind, const ScannedFrame& frame);

}  // namespace kvbm::bindings
