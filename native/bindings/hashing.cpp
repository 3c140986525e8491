#include "kvbm/hashing.hpp"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "python.hpp"

namespace kvbm::bindings {
namespace {

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
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(tokens.ptr());
    copied_.resize(static_cast<std::size_t>(count));
    PyObject** const items = PySequence_Fast_ITEMS(tokens.ptr());
    for (Py_ssize_t index = 0; index < count; ++index) {
      int overflow = 0;
      // An exact int runs no Python code, so the list cannot change here.
      const long long value = PyLong_CheckExact(items[index]) ? PyLong_AsLongLongAndOverflow(items[index], &overflow) : -1;
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

void check_sizes(const Tokens& tokens, std::int64_t block_tokens, const nb::bytes& root, const ExtraKeys& keys) {
  if (block_tokens < 1) {
    throw Error(ErrorCode::kLayout,
                "block_tokens is " + std::to_string(block_tokens) + "; a block holds at least 1 token");
  }
  if (root.size() != kHashBytes) {
    throw Error(ErrorCode::kLayout,
                "the root has " + std::to_string(root.size()) + " bytes, not " + std::to_string(kHashBytes));
  }
  const std::size_t count = tokens.span().size() / static_cast<std::size_t>(block_tokens);
  if (!keys.views.empty() && keys.views.size() != count) {
    throw Error(ErrorCode::kLayout, std::to_string(keys.views.size()) + " extra keys for " + std::to_string(count) +
                                        " full blocks; give one a block, or none");
  }
}

nb::bytes hash_sequence(const Tokens& tokens, std::int64_t block_tokens, const nb::bytes& root, const ExtraKeys& keys) {
  check_sizes(tokens, block_tokens, root, keys);
  SequenceHash start;
  std::copy_n(static_cast<const std::uint8_t*>(root.data()), kHashBytes, start.begin());
  const auto span = tokens.span();
  const nb::bytes hashes = new_bytes(span.size() / static_cast<std::size_t>(block_tokens) * kHashBytes);
  std::optional<nb::gil_scoped_release> released;
  if (span.size_bytes() > kReleaseGilBytes) {
    released.emplace();
  }
  sequence_hashes(span, static_cast<std::size_t>(block_tokens), start, keys.views, writable(hashes));
  return hashes;
}

}  // namespace

void bind_hashing(nb::module_& module, const SharedErrors& errors) {
  const nb::object token_column = nb::module_::import_("kvbm.core.hashing").attr("token_column");
  module.def(
      "sequence_hashes",
      [errors, token_column](nb::handle tokens, std::int64_t block_tokens, const nb::bytes& root, nb::handle extra_keys) {
        return translated(errors, [&] {
          return hash_sequence(Tokens(tokens, token_column), block_tokens, root, ExtraKeys(extra_keys));
        });
      },
      nb::arg("tokens"), nb::arg("block_tokens"), nb::arg("root"), nb::arg("extra_keys") = nb::tuple(),
      "Chain-hash the full blocks of a token sequence: T // block_tokens hashes, packed, 16 bytes each.");
}

}  // namespace kvbm::bindings
