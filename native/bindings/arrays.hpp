// Arrays for NumPy over what C++ has made. GIL held.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {

// An array over memory that its owner frees when the array goes.
template <class Element, class Owner>
nb::object array_over(Element* data, std::initializer_list<std::size_t> shape, Owner* owner) {
  const nb::capsule keeper(owner, [](void* pointer) noexcept { delete static_cast<Owner*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, Element>(data, shape, keeper));
}

// (n, width) of a buffer, of which the array takes possession.
template <class Element>
nb::object rows_over(std::unique_ptr<Element[]> data, std::initializer_list<std::size_t> shape) {
  Element* const first = data.get();
  return array_over(first, shape, new std::unique_ptr<Element[]>(std::move(data)));
}

// A vector of rows, as an array of their type in Python.
template <class Row>
nb::object records_over(std::vector<Row> rows, const nb::object& row_type) {
  auto* const owner = new std::vector<Row>(std::move(rows));
  auto* const bytes = reinterpret_cast<std::uint8_t*>(owner->data());
  return array_over(bytes, {owner->size() * sizeof(Row)}, owner).attr("view")(row_type);
}

}  // namespace kvbm::bindings
