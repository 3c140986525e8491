#include "kvbm/hashing.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "python.hpp"
#include "tokens.hpp"

namespace kvbm::bindings {
namespace {

std::size_t checked_block_tokens(std::int64_t block_tokens) {
  if (block_tokens < 1) {
    throw Error(ErrorCode::kLayout,
                "block_tokens is " + std::to_string(block_tokens) + "; a block holds at least 1 token");
  }
  return static_cast<std::size_t>(block_tokens);
}

nb::bytes hash_sequence(const Tokens& tokens, std::int64_t given_block_tokens, const nb::bytes& root,
                        const ExtraKeys& keys) {
  const std::size_t block_tokens = checked_block_tokens(given_block_tokens);
  const SequenceHash start = root_hash(root);
  const auto span = tokens.span();
  const std::size_t count = span.size() / block_tokens;
  if (!keys.views.empty() && keys.views.size() != count) {
    throw Error(ErrorCode::kLayout, std::to_string(keys.views.size()) + " extra keys for " + std::to_string(count) +
                                        " full blocks; give one a block, or none");
  }
  const nb::bytes hashes = new_bytes(count * kHashBytes);
  {
    std::optional<GilReleased> released;
    if (span.size_bytes() > kReleaseGilBytes) {
      released.emplace();
    }
    sequence_hashes(span, block_tokens, start, keys.views, writable(hashes));
  }
  return hashes;
}

nb::list hash_batch(nb::sequence prompts, std::int64_t given_block_tokens, nb::handle roots,
                    const nb::object& token_column) {
  const std::size_t prompt_count = nb::len(prompts);
  std::vector<Tokens> tokens;
  tokens.reserve(prompt_count);
  for (nb::handle prompt : prompts) {
    tokens.emplace_back(prompt, token_column);
  }
  const std::size_t block_tokens = checked_block_tokens(given_block_tokens);
  std::vector<SequenceHash> starts;
  if (PyBytes_Check(roots.ptr())) {
    starts.assign(tokens.size(), root_hash(nb::borrow<nb::bytes>(roots)));
  } else {
    for (nb::handle root : roots) {
      if (!PyBytes_Check(root.ptr())) {
        throw nb::type_error("a root is bytes");
      }
      starts.push_back(root_hash(nb::borrow<nb::bytes>(root)));
    }
  }
  if (starts.size() != tokens.size()) {
    throw Error(ErrorCode::kLayout, std::to_string(starts.size()) + " roots for " + std::to_string(tokens.size()) +
                                        " prompts; give one a prompt, or one for all");
  }
  nb::list hashes;
  std::vector<HashJob> jobs;
  jobs.reserve(tokens.size());
  std::size_t bytes = 0;
  for (std::size_t index = 0; index < tokens.size(); ++index) {
    const auto span = tokens[index].span();
    const nb::bytes packed = new_bytes(span.size() / block_tokens * kHashBytes);
    jobs.push_back({.tokens = span, .root = starts[index], .out = writable(packed).data()});
    hashes.append(packed);
    bytes += span.size_bytes();
  }
  {
    std::optional<GilReleased> released;
    if (bytes > kReleaseGilBytes) {
      released.emplace();
    }
    sequence_hashes_batch(jobs, block_tokens);
  }
  return hashes;
}

Error not_bytes(const std::string& what, nb::handle value) {
  return Error(ErrorCode::kLayout, what + " is " + nb::str(value.type().attr("__name__")).c_str() + ", not bytes");
}

// The bytes of a digest. Throws Error: kLayout, when it has none.
Bytes digest_of(PyObject* items, bool is_list, std::size_t index) {
  PyObject* const digest = item_of(items, is_list, static_cast<Py_ssize_t>(index));
  const auto bytes = bytes_if(digest);
  if (!bytes) {
    throw not_bytes("digest " + std::to_string(index), digest);
  }
  return *bytes;
}

// Derives the hashes of a list where it lies, a few digests at a time. False, with nothing of use in `out`, when they
// have so many bytes that the GIL is better released.
bool derive_in_place(const SequenceHash& root, PyObject* list, std::size_t count, std::span<std::uint8_t> out) {
  constexpr std::size_t kAtOnce = 64;
  std::array<Bytes, kAtOnce> views;
  std::size_t bytes = 0;
  for (std::size_t begin = 0; begin < count; begin += kAtOnce) {
    const std::size_t some = std::min(kAtOnce, count - begin);
    for (std::size_t at = 0; at < some; ++at) {
      views[at] = digest_of(list, true, begin + at);
      bytes += views[at].size();
    }
    if (bytes > kReleaseGilBytes) {
      return false;
    }
    derived_hashes(root, std::span(views).first(some), out.subspan(begin * kHashBytes, some * kHashBytes));
  }
  return true;
}

nb::bytes hash_derived(nb::handle root, nb::handle digests) {
  if (!PyBytes_Check(root.ptr())) {
    throw not_bytes("the root", root);
  }
  const SequenceHash start = root_hash(nb::borrow<nb::bytes>(root));
  if (PyList_CheckExact(digests.ptr())) {
    const auto count = static_cast<std::size_t>(length_of(digests.ptr(), true));
    const nb::bytes hashes = new_bytes(count * kHashBytes);
    if (derive_in_place(start, digests.ptr(), count, writable(hashes))) {
      return hashes;
    }
  }
  PyObject* const items = PySequence_Tuple(digests.ptr());  // of our own: a list may change once the GIL is released
  if (items == nullptr) {
    throw nb::python_error();
  }
  const auto kept = nb::steal<nb::tuple>(items);
  std::vector<Bytes> views(kept.size());
  std::size_t bytes = 0;
  for (std::size_t index = 0; index < views.size(); ++index) {
    views[index] = digest_of(items, false, index);
    bytes += views[index].size();
  }
  const nb::bytes hashes = new_bytes(views.size() * kHashBytes);
  {
    std::optional<GilReleased> released;
    if (bytes > kReleaseGilBytes) {
      released.emplace();
    }
    derived_hashes(start, views, writable(hashes));
  }
  return hashes;
}

}  // namespace

void bind_hashing(nb::module_& module, const SharedErrors& errors) {
  const nb::object token_column = nb::module_::import_("kvbm.core.hashing").attr("token_column");
  module.def(
      "sequence_hashes",
      [errors, token_column](nb::handle tokens, std::int64_t block_tokens, const nb::bytes& root,
                             nb::handle extra_keys) {
        return translated(errors, [&] {
          return hash_sequence(Tokens(tokens, token_column), block_tokens, root, ExtraKeys(extra_keys));
        });
      },
      nb::arg("tokens"), nb::arg("block_tokens"), nb::arg("root"), nb::arg("extra_keys") = nb::tuple(),
      "Chain-hash the full blocks of a token sequence: T // block_tokens hashes, packed, 16 bytes each.");
  module.def(
      "packed_tokens",
      [errors, token_column](nb::handle tokens) {
        return translated(errors, [&] {
          const Tokens column(tokens, token_column);
          const auto span = column.span();
          return nb::bytes(span.data(), span.size_bytes());
        });
      },
      nb::arg("tokens"), "Token ids as u32, little-endian, packed.");
  module.def(
      "derived_hashes",
      [errors](nb::handle root, nb::handle digests) {
        return translated(errors, [&] { return hash_derived(root, digests); });
      },
      nb::arg("root").none(), nb::arg("digests"),
      "The first 16 bytes of SHA-256(root, digest) for each digest, packed.");
  module.def(
      "sequence_hashes_batch",
      [errors, token_column](nb::sequence prompts, std::int64_t block_tokens, nb::handle roots) {
        return translated(errors, [&] { return hash_batch(std::move(prompts), block_tokens, roots, token_column); });
      },
      nb::arg("prompts"), nb::arg("block_tokens"), nb::arg("roots"),
      "What sequence_hashes gives for each prompt, hashed side by side. `roots`: one for all, or one each.");
}

}  // namespace kvbm::bindings
