// kvbm._native: core's names in C++. kvbm.assembly alone imports it.
#include "python.hpp"

namespace kvbm::bindings {

ErrorClasses::ErrorClasses() {
  const nb::module_ errors = nb::module_::import_("kvbm.core.errors");
  layout_ = errors.attr("LayoutError");
  not_a_frame_ = errors.attr("NotAFrameError");
  newer_frame_ = errors.attr("NewerFrameError");
  torn_frame_ = errors.attr("TornFrameError");
  corrupt_frame_ = errors.attr("CorruptFrameError");
  malformed_frame_ = errors.attr("MalformedFrameError");
  ledger_ = errors.attr("LedgerError");
  illegal_event_ = errors.attr("IllegalEventError");
}

void ErrorClasses::raise(const Error& error) const {
  const auto set = [](const nb::object& kind, const nb::object& instance) {
    PyErr_SetObject(kind.ptr(), instance.ptr());
  };
  const auto set_frame = [&](const nb::object& kind) { set(kind, kind(error.at(), error.detail())); };
  switch (error.code()) {
    case ErrorCode::kLayout:
      set(layout_, layout_(error.detail()));
      break;
    case ErrorCode::kNotAFrame:
      set_frame(not_a_frame_);
      break;
    case ErrorCode::kNewerFrame:
      set(newer_frame_, newer_frame_(error.at(), error.version(), error.supported()));
      break;
    case ErrorCode::kTornFrame:
      set_frame(torn_frame_);
      break;
    case ErrorCode::kCorruptFrame:
      set_frame(corrupt_frame_);
      break;
    case ErrorCode::kMalformedFrame:
      set_frame(malformed_frame_);
      break;
    case ErrorCode::kLedger:
      set(ledger_, ledger_(error.detail()));
      break;
    case ErrorCode::kIllegalEvent:
      set(illegal_event_, illegal_event_(error.rule(), error.detail()));
      break;
  }
  throw nb::python_error();
}

}  // namespace kvbm::bindings

NB_MODULE(_native, module) {
  using namespace kvbm::bindings;
  module.doc() = "The functions of kvbm.core that exist twice, in C++.";
  const auto errors = std::make_shared<const ErrorClasses>();
  bind_checksum(module);
  bind_event(module);
  bind_hashing(module, errors);
  bind_codec(module, errors);
  bind_ledger(module, errors);
}
