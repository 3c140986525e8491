// kvbm._native: core's names in C++. kvbm.assembly alone imports it.
#include <nanobind/stl/optional.h>

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
  checkpoint_ = errors.attr("CheckpointError");
  peer_wire_ = errors.attr("PeerWireError");
  config_ = errors.attr("ConfigError");
}

nb::object ErrorClasses::made(const Error& error) const {
  switch (error.code()) {
    case ErrorCode::kLayout:
      return layout_(error.detail());
    case ErrorCode::kNotAFrame:
      return not_a_frame_(error.at(), error.detail());
    case ErrorCode::kNewerFrame:
      return newer_frame_(error.at(), error.version(), error.supported());
    case ErrorCode::kTornFrame:
      return torn_frame_(error.at(), error.detail());
    case ErrorCode::kCorruptFrame:
      return corrupt_frame_(error.at(), error.detail());
    case ErrorCode::kMalformedFrame:
      return malformed_frame_(error.at(), error.detail());
    case ErrorCode::kLedger:
      return ledger_(error.detail(), error.tier(), error.slot(), error.copy());
    case ErrorCode::kIllegalEvent:
      return illegal_event_(nb::str(error.rule().data(), error.rule().size()), error.detail());
    case ErrorCode::kCheckpoint:
      return checkpoint_(error.at(), error.detail());
    case ErrorCode::kPeerWire:
      return peer_wire_(error.detail());
    case ErrorCode::kConfig:
      return config_(error.detail());
  }
  throw nb::type_error("an error of no class");
}

void ErrorClasses::raise(const Error& error) const {
  const nb::object instance = made(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
  throw nb::python_error();
}

}  // namespace kvbm::bindings

NB_MODULE(_native, module) {
  using namespace kvbm::bindings;
  module.doc() = "The functions of kvbm.core that exist twice, in C++.";
  // An engine may end its process while a manager lives; the interpreter then frees nothing, and that is no finding.
  nanobind::set_leak_warnings(false);
  const auto errors = std::make_shared<const ErrorClasses>();
  bind_checksum(module, errors);
  bind_limits(module);
  bind_event(module);
  bind_engine_chains(module, errors);
  bind_hashing(module, errors);
  bind_codec(module, errors);
  bind_scan(module, errors);
  bind_frame_fold(module, errors);
  bind_router(module, errors);
  bind_plain_frames(module, errors);
  bind_cluster_index(module, errors);
  bind_columns(module, errors);
  bind_ledger(module, errors);
  bind_foreign_ledger(module, errors);
  bind_ledger_lock(module);
  bind_row_copy(module, errors);
  bind_arena(module);
  bind_segment_copy(module, errors);
  bind_copy_queue(module, errors);
  bind_device_ring(module, errors);
  bind_block_io(module, errors);
  bind_peer_tls(module, errors);
  bind_peer_server(module, errors);
  bind_block_coding(module, errors);
  bind_nats_messages(module);
  bind_number_list(module);
  bind_plain_question(module);
  bind_peer_wire(module, errors);
  bind_peer_client(module, errors);
  bind_object_receiver(module, errors);
  bind_last_touches(module, errors);
  bind_told_tiers(module, errors);
  bind_block_ages(module, errors);
  bind_usage_meter(module, errors);
}
