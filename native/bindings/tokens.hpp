// Arguments of the functions that hash tokens: token ids, extra keys, a root.
#pragma once

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {

using Column = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Tokens as a span of u32: a list's are copied, a u32 array's are used where they lie, and anything else (also what is
// wrong) goes through hashing.token_column first.
class Tokens {
 public:
  Tokens(nb::handle tokens, const nb::object& token_column) {
    if (!copy_integers(tokens) && !nb::try_cast(tokens, array_, false)) {
      array_ = nb::cast<Column>(token_column(tokens));
    }
  }

  std::span<const std::uint32_t> span() const {
    return array_.is_valid() ? std::span(array_.data(), array_.shape(0)) : std::span<const std::uint32_t>(copied_);
  }

 private:
  bool copy_integers(nb::handle tokens) {
    const bool is_list = PyList_CheckExact(tokens.ptr());
    if (!is_list && !PyTuple_CheckExact(tokens.ptr())) {
      return false;
    }
    const Py_ssize_t count = length_of(tokens.ptr(), is_list);
    copied_.resize(static_cast<std::size_t>(count));
    for (Py_ssize_t index = 0; index < count; ++index) {
      PyObject* const item = item_of(tokens.ptr(), is_list, index);
      int overflow = 0;
      // An exact int runs no Python code, so the list cannot change here.
      const long long value = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
      if (overflow != 0 || value < 0 || value > 0xFFFFFFFF) {
        return false;
      }
      copied_[static_cast<std::size_t>(index)] = static_cast<std::uint32_t>(value);
    }
    return true;
  }

  std::vector<std::uint32_t> copied_;  // a list's tokens
  Column array_;                       // an array's tokens, when valid
};

// Extra keys as bytes, kept alive while they are read.
struct ExtraKeys {
  explicit ExtraKeys(nb::handle keys) {
    for (nb::handle key : keys) {
      views.push_back(kept_bytes(nb::borrow(key), owners));
    }
  }

  Keepers owners;            // the keys
  std::vector<Bytes> views;  // the same as spans
};

inline SequenceHash root_hash(const nb::bytes& root) {
  if (root.size() != kHashBytes) {
    throw Error(ErrorCode::kLayout,
                "the root has " + std::to_string(root.size()) + " bytes, not " + std::to_string(kHashBytes));
  }
  SequenceHash hash;
  std::copy_n(static_cast<const std::uint8_t*>(root.data()), kHashBytes, hash.begin());
  return hash;
}

}  // namespace kvbm::bindings
