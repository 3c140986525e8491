#include "kvbm/scan.hpp"

#include <algorithm>
#include <optional>

#include "frames.hpp"
#include "python.hpp"

namespace kvbm::bindings {

nb::object python_scanned(const nb::object& kind, const ScannedFrame& frame) {
  const FrameHeader& header = frame.header;
  const auto& blocks = frame.blocks;
  // The last offset may be the largest of all, so the one after it is Python's to compute.
  const nb::object next_offset = nb::int_(header.first_offset) + nb::int_(header.event_count);
  return named_tuple(kind, python_text(header.instance), header.epoch, header.first_offset, next_offset,
                     header.wall_time_ns, header.digest, nb::make_tuple(blocks[0], blocks[1], blocks[2], blocks[3]),
                     frame.at, frame.end(), frame.flaw);
}

void check_epoch(ScannedFrame& frame, const nb::object& epoch) {
  if (frame.flaw.empty() && !epoch.equal(nb::int_(frame.header.epoch))) {
    frame.flaw = "the frame is of epoch " + std::to_string(frame.header.epoch) + ", its InstanceStarted of epoch " +
                 nb::str(epoch).c_str();
  }
}

namespace {

// The error Python finds in the starts of one frame, or None. A start of another epoch than its frame's is a flaw.
nb::object fault_in(ScannedFrame& frame, const FrameClasses& classes) {
  try {
    for (const Bytes& start : frame.starts) {
      check_epoch(frame, decode_started(classes, start, frame.at).attr("epoch"));
    }
  } catch (nb::python_error& error) {
    if (!error.matches(nb::module_::import_("kvbm.core.errors").attr("FrameError"))) {
      throw;
    }
    return nb::borrow(error.value());
  }
  return nb::none();
}

nb::object scanned(Bytes data, std::size_t at, const FrameClasses& classes, const nb::object& kind,
                   const ErrorClasses& errors) {
  FrameScan scan;
  {
    std::optional<GilReleased> released;
    if (data.size() - std::min(at, data.size()) > kReleaseGilBytes) {
      released.emplace();
    }
    scan = scan_frames(data, at);
  }
  nb::list frames;
  for (ScannedFrame& frame : scan.frames) {
    nb::object fault = fault_in(frame, classes);
    if (!fault.is_none()) {
      return nb::make_tuple(frames, fault);
    }
    frames.append(python_scanned(kind, frame));
  }
  if (!scan.error) {
    return nb::make_tuple(frames, nb::none());
  }
  ScannedFrame bad;
  bad.at = scan.error->at();
  bad.starts = std::move(scan.starts);
  nb::object fault = fault_in(bad, classes);
  return nb::make_tuple(frames, fault.is_none() ? errors.made(*scan.error) : fault);
}

}  // namespace

void bind_scan(nb::module_& module, const SharedErrors& errors) {
  const SharedClasses classes = frame_classes();
  const nb::object kind = nb::module_::import_("kvbm.core.codec").attr("ScannedFrame");
  module.def(
      "scan_frames",
      [errors, classes, kind](nb::handle data, std::size_t at) {
        return scanned(BufferView(data).bytes(), at, *classes, kind, *errors);
      },
      nb::arg("data"), nb::arg("at") = 0,
      "The good frames from a position on, and what ended them early, if anything did. As "
      "kvbm.core.codec.scan_frames.");
}

}  // namespace kvbm::bindings
