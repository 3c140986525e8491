// What every binding needs: errors across the border, and views of Python's buffers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvbm/error.hpp"
#include "kvbm/event.hpp"
#include "stable.hpp"

namespace kvbm::bindings {

namespace nb = nanobind;

// Work on more bytes than this releases the GIL; below it, giving the GIL away costs more than the work.
inline constexpr std::size_t kReleaseGilBytes = 32 * 1024;

// Gives the GIL away for its life.
//
// Before 3.14 an interpreter that ends takes a thread that wants the GIL back by unwinding its stack, and a destructor
// that is unwound ends the process with SIGABRT. Such a thread stays here instead, with all it holds, until the process
// is gone.
class GilReleased {
 public:
  GilReleased() : thread_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // it throws nothing: this is the unwinding, which must not leave a destructor
      while (true) {
        pause();
      }
    }
  }

 private:
  PyThreadState* const thread_;  // of whoever gave it away
};

// The classes of kvbm.core.errors. Made once when the module is imported and shared by its functions; immutable, GIL
// held.
class ErrorClasses {
 public:
  ErrorClasses();

  // The Python error an Error stands for.
  nb::object made(const Error& error) const;
  // Raises it.
  [[noreturn]] void raise(const Error& error) const;

 private:
  nb::object layout_;           // LayoutError
  nb::object not_a_frame_;      // NotAFrameError
  nb::object newer_frame_;      // NewerFrameError
  nb::object torn_frame_;       // TornFrameError
  nb::object corrupt_frame_;    // CorruptFrameError
  nb::object malformed_frame_;  // MalformedFrameError
  nb::object illegal_event_;    // IllegalEventError
  nb::object checkpoint_;       // CheckpointError
  nb::object ledger_;           // LedgerError
  nb::object peer_wire_;        // PeerWireError
  nb::object config_;           // ConfigError
};

using SharedErrors = std::shared_ptr<const ErrorClasses>;

// Calls a function and turns a thrown Error into its Python error.
template <class Function>
auto translated(const SharedErrors& errors, Function&& function) -> std::invoke_result_t<Function> {
  try {
    return function();
  } catch (const Error& error) {
    errors->raise(error);
  }
}

// A contiguous view of a Python buffer, held for this object's life; it may be read without the GIL, not made or
// dropped.
class BufferView {
 public:
  explicit BufferView(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) {
      throw nb::python_error();
    }
  }
  BufferView(const BufferView&) = delete;
  BufferView& operator=(const BufferView&) = delete;
  ~BufferView() { PyBuffer_Release(&view_); }

  Bytes bytes() const noexcept {
    return {static_cast<const std::uint8_t*>(view_.buf), static_cast<std::size_t>(view_.len)};
  }

 private:
  Py_buffer view_;  // Python's own record of the view
};

// New bytes of a size, to be filled before anything else sees them.
inline nb::bytes new_bytes(std::size_t size) {
  PyObject* const object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (object == nullptr) {
    throw nb::python_error();
  }
  return nb::steal<nb::bytes>(object);
}

inline std::span<std::uint8_t> writable(const nb::bytes& bytes) noexcept {
  return {reinterpret_cast<std::uint8_t*>(characters(bytes.ptr())), bytes.size()};
}

inline nb::bytes copy_bytes(Bytes data) { return nb::bytes(data.data(), data.size()); }

// Python objects that spans point into, kept alive while those are read.
using Keepers = std::vector<nb::object>;

// An object as bytes; a bytearray or memoryview is copied, for it may change.
inline nb::object as_bytes(nb::object value) {
  if (PyBytes_Check(value.ptr())) {
    return value;
  }
  PyObject* const copy = PyBytes_FromObject(value.ptr());
  if (copy == nullptr) {
    throw nb::python_error();
  }
  return nb::steal(copy);
}

inline Bytes view_of(const nb::object& bytes) noexcept { return bytes_of(bytes.ptr()); }

// The bytes of an object, which then are kept.
inline Bytes kept_bytes(nb::object value, Keepers& keepers) {
  return view_of(keepers.emplace_back(as_bytes(std::move(value))));
}

// The members of an IntEnum that counts from 0.
class EnumClass {
 public:
  EnumClass(const nb::module_& module, const char* name) : kind_(module.attr(name)) {
    for (nb::handle member : kind_) {
      members_.push_back(nb::borrow(member));
    }
  }

  template <class Member>
  const nb::object& operator()(Member member) const {
    return members_[static_cast<std::size_t>(member)];
  }

  bool has(nb::handle object) const { return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == kind_.ptr(); }

 private:
  nb::object kind_;                  // the class
  std::vector<nb::object> members_;  // by value
};

// A field of a frame or event as an unsigned number. Throws Error: kLayout, when it is none or too large.
template <class Number>
Number number(nb::handle value) {
  unsigned long long wide = PyLong_AsUnsignedLongLong(value.ptr());
  bool has_failed = wide == std::numeric_limits<unsigned long long>::max() && PyErr_Occurred() != nullptr;
  if (has_failed) {  // not an int, but perhaps one of numpy's
    PyErr_Clear();
    const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
    wide = index.is_valid() ? PyLong_AsUnsignedLongLong(index.ptr()) : 0;
    has_failed = PyErr_Occurred() != nullptr;
  }
  if (has_failed || wide > std::numeric_limits<Number>::max()) {
    PyErr_Clear();
    throw Error(ErrorCode::kLayout, "a number does not fit the frame: " + std::string(nb::repr(value).c_str()));
  }
  return static_cast<Number>(wide);
}

// An enum member's code; the enum's own type limits it no further than a byte.
template <class Enum>
Enum code(nb::handle value) {
  return static_cast<Enum>(number<std::uint8_t>(value));
}

// A name's UTF-8, cached inside the string object. Throws Error: kLayout, when it has none.
inline std::string_view utf8(nb::handle name, const char* whose) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError) == 0) {
      throw nb::python_error();
    }
    PyErr_Clear();
    throw Error(ErrorCode::kLayout, std::string(whose) + " has no UTF-8");
  }
  return {text, static_cast<std::size_t>(size)};
}

// A hash or namespace id of exactly 16 bytes. Throws Error: kLayout.
inline std::array<std::uint8_t, kHashBytes> sixteen(const nb::object& value, const char* what) {
  const nb::object owner = as_bytes(value);
  const Bytes view = view_of(owner);
  if (view.size() != kHashBytes) {
    throw Error(ErrorCode::kLayout,
                std::string(what) + " of " + std::to_string(view.size()) + " bytes, not " + std::to_string(kHashBytes));
  }
  std::array<std::uint8_t, kHashBytes> id;
  std::copy_n(view.begin(), kHashBytes, id.begin());
  return id;
}

inline bool is_true(nb::handle value) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) {
    throw nb::python_error();
  }
  return truth != 0;
}

void bind_checksum(nb::module_& module, const SharedErrors& errors);
void bind_limits(nb::module_& module);
void bind_event(nb::module_& module);
void bind_engine_chains(nb::module_& module, const SharedErrors& errors);
void bind_hashing(nb::module_& module, const SharedErrors& errors);
void bind_codec(nb::module_& module, const SharedErrors& errors);
void bind_scan(nb::module_& module, const SharedErrors& errors);
void bind_frame_fold(nb::module_& module, const SharedErrors& errors);
void bind_cluster_index(nb::module_& module, const SharedErrors& errors);
void bind_router(nb::module_& module, const SharedErrors& errors);
void bind_plain_frames(nb::module_& module, const SharedErrors& errors);
void bind_columns(nb::module_& module, const SharedErrors& errors);
void bind_ledger(nb::module_& module, const SharedErrors& errors);
void bind_foreign_ledger(nb::module_& module, const SharedErrors& errors);
void bind_ledger_lock(nb::module_& module);
void bind_peer_tls(nb::module_& module, const SharedErrors& errors);
void bind_peer_server(nb::module_& module, const SharedErrors& errors);
void bind_row_copy(nb::module_& module, const SharedErrors& errors);
void bind_arena(nb::module_& module);
void bind_segment_copy(nb::module_& module, const SharedErrors& errors);
void bind_copy_queue(nb::module_& module, const SharedErrors& errors);
void bind_device_ring(nb::module_& module, const SharedErrors& errors);
void bind_block_io(nb::module_& module, const SharedErrors& errors);
void bind_block_coding(nb::module_& module, const SharedErrors& errors);
void bind_nats_messages(nb::module_& module);
void bind_number_list(nb::module_& module);
void bind_plain_question(nb::module_& module);
void bind_peer_wire(nb::module_& module, const SharedErrors& errors);
void bind_peer_client(nb::module_& module, const SharedErrors& errors);
void bind_object_receiver(nb::module_& module, const SharedErrors& errors);
void bind_last_touches(nb::module_& module, const SharedErrors& errors);
void bind_told_tiers(nb::module_& module, const SharedErrors& errors);
void bind_block_ages(nb::module_& module, const SharedErrors& errors);
void bind_usage_meter(nb::module_& module, const SharedErrors& errors);

}  // namespace kvbm::bindings
