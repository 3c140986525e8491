// Python classes whose instances are made here: NamedTuples and msgspec Structs. GIL held throughout.
#pragma once

#include <array>
#include <cstddef>

#include "python.hpp"

namespace kvbm::bindings {

// A NamedTuple class whose instances are made without a call.
class TupleClass {
 public:
  TupleClass(const nb::module_& module, const char* name) : kind_(module.attr(name)), alloc_(allocator_of(kind_)) {}

  // Steals the references of its values.
  template <class... Values>
  nb::object operator()(Values... values) const {
    PyObject* const made = alloc_(reinterpret_cast<PyTypeObject*>(kind_.ptr()), sizeof...(Values));
    Py_ssize_t at = 0;
    (NB_TUPLE_SET_ITEM(made, at++, values), ...);
    if (made == nullptr || PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    return nb::steal(made);
  }

 private:
  nb::object kind_;  // the class
  allocfunc alloc_;  // makes its instances
};

// A msgspec Struct class, whose instances are made by one call each.
template <std::size_t kFieldCount>
class StructClass {
 public:
  // fields: all of them that are to be given, in the order of the class. Their names are interned: msgspec finds those
  // by their address.
  StructClass(const nb::module_& module, const char* name, const std::array<const char*, kFieldCount>& fields)
      : kind_(module.attr(name)), names_(names_of(fields)) {}

  // Steals the references of its values, one for each field.
  template <class... Values>
  nb::object operator()(Values... values) const {
    static_assert(sizeof...(Values) == kFieldCount);
    const std::array<PyObject*, kFieldCount> given{values...};
    bool is_whole = true;
    for (PyObject* const value : given) {
      is_whole = is_whole && value != nullptr;
    }
    PyObject* const made = is_whole ? PyObject_Vectorcall(kind_.ptr(), given.data(), 0, names_.ptr()) : nullptr;
    for (PyObject* const value : given) {
      Py_XDECREF(value);
    }
    if (made == nullptr) {
      throw nb::python_error();
    }
    return nb::steal(made);
  }

 private:
  static nb::tuple names_of(const std::array<const char*, kFieldCount>& fields) {
    nb::list names;
    for (const char* const field : fields) {
      names.append(nb::steal(PyUnicode_InternFromString(field)));
    }
    return nb::tuple(names);
  }

  const nb::object kind_;  // the class
  const nb::tuple names_;  // of the fields
};

}  // namespace kvbm::bindings
