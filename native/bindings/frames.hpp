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
const nb::object& python_tier(const FrameClasses& classes, Tier tier);

// A Python event as a view; `keepers` keep its bytes. Throws Error: kLayout, when it does not fit a frame.
Event event_of(nb::handle event, const FrameClasses& classes, Keepers& keepers);

// The InstanceStarted of a frame at a position. Raises MalformedFrameError.
nb::object decode_started(const FrameClasses& classes, Bytes blob, std::uint64_t at);

// A ScannedFrame of kvbm.core.codec. `kind` is that class.
nb::object python_scanned(const nb::object& kind, const ScannedFrame& frame);

}  // namespace kvbm::bindings
