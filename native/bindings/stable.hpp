// Python's C API where the one of a version and the stable one differ. Under Py_LIMITED_API, as for the abi3 wheel,
// objects' memory is out of reach, and each of these calls a function.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <optional>

#include "kvbm/event.hpp"

namespace kvbm::bindings {

namespace nb = nanobind;

// The characters of a bytes object.
inline char* characters(PyObject* bytes) noexcept {
#if defined(Py_LIMITED_API)
  return PyBytes_AsString(bytes);
#else
  return PyBytes_AS_STRING(bytes);
#endif
}

// What an object holds that must be bytes, for as long as it lives; nothing when it is none.
inline std::optional<Bytes> bytes_if(PyObject* object) noexcept {
  char* begin = nullptr;
  Py_ssize_t size = 0;
#if defined(Py_LIMITED_API)
  if (PyBytes_AsStringAndSize(object, &begin, &size) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
#else
  if (!PyBytes_Check(object)) {
    return std::nullopt;
  }
  begin = PyBytes_AS_STRING(object);
  size = PyBytes_GET_SIZE(object);
#endif
  return Bytes{reinterpret_cast<const std::uint8_t*>(begin), static_cast<std::size_t>(size)};
}

// What a bytes object holds.
inline Bytes bytes_of(PyObject* bytes) noexcept { return bytes_if(bytes).value_or(Bytes{}); }

// The length of a list, or of a tuple.
inline Py_ssize_t length_of(PyObject* items, bool is_list) noexcept {
#if defined(Py_LIMITED_API)
  return is_list ? PyList_Size(items) : PyTuple_Size(items);
#else
  return is_list ? PyList_GET_SIZE(items) : PyTuple_GET_SIZE(items);
#endif
}

// A member of a list, or of a tuple, borrowed; `index` is below its length.
inline PyObject* item_of(PyObject* items, bool is_list, Py_ssize_t index) noexcept {
  return is_list ? NB_LIST_GET_ITEM(items, index) : NB_TUPLE_GET_ITEM(items, index);
}

// What makes an empty instance of a class of tuples, without a call of its Python constructor.
inline allocfunc allocator_of(nb::handle kind) noexcept {
  auto* const type = reinterpret_cast<PyTypeObject*>(kind.ptr());
#if defined(Py_LIMITED_API)
  return reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
#else
  return type->tp_alloc;
#endif
}

// tuple.__new__ for a class below tuple; null with an error set.
inline PyObject* tuple_from(nb::handle kind, nb::handle arguments) noexcept {
#if defined(Py_LIMITED_API)
  const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
#else
  const auto make = PyTuple_Type.tp_new;
#endif
  return make(reinterpret_cast<PyTypeObject*>(kind.ptr()), arguments.ptr(), nullptr);
}

}  // namespace kvbm::bindings
