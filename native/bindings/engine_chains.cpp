#include "kvbm/engine_chains.hpp"

#include <optional>
#include <string>

#include "python.hpp"
#include "tokens.hpp"

namespace kvbm::bindings {
namespace {

EngineChain chain_of(const std::string& name) {
  const auto chain = engine_chain(name);
  if (!chain) {
    throw Error(ErrorCode::kLayout, "'" + name + "' is no chain; core.engine_chains.CHAINS has them");
  }
  return *chain;
}

std::size_t checked_hash_tokens(std::int64_t hash_tokens) {
  if (hash_tokens < 1 || hash_tokens > static_cast<std::int64_t>(kMostHashTokens)) {
    throw Error(ErrorCode::kLayout,
                "hash_tokens is " + std::to_string(hash_tokens) + "; give 1 to " + std::to_string(kMostHashTokens));
  }
  return static_cast<std::size_t>(hash_tokens);
}

void check_begin(EngineChain chain, const nb::bytes& begin) {
  if (begin.size() != kDigestBytes && (begin.size() != 0 || chain != EngineChain::kSglangSha256)) {
    throw Error(ErrorCode::kLayout,
                "a chain begins with " + std::to_string(kDigestBytes) + " bytes, not " + std::to_string(begin.size()));
  }
}

void check_keys(EngineChain chain, const ExtraKeys& keys, std::size_t count) {
  if (!keys.views.empty() && (keys.views.size() != count || chain == EngineChain::kSglangSha256)) {
    throw Error(ErrorCode::kLayout, std::to_string(keys.views.size()) + " extra keys for " + std::to_string(count) +
                                        " blocks; give one a block, or none, and none of SGLang");
  }
  for (const Bytes key : keys.views) {
    if (key.size() > kMostKeyBytes) {
      throw Error(ErrorCode::kLayout,
                  "the extra keys of a block have more than " + std::to_string(kMostKeyBytes) + " bytes");
    }
  }
}

nb::bytes digests_of(const std::string& kind, const Tokens& tokens, std::int64_t given_hash_tokens,
                     const nb::bytes& begin, const ExtraKeys& keys) {
  const EngineChain chain = chain_of(kind);
  const std::size_t hash_tokens = checked_hash_tokens(given_hash_tokens);
  check_begin(chain, begin);
  const auto span = tokens.span();
  const std::size_t count = span.size() / hash_tokens;
  check_keys(chain, keys, count);
  const nb::bytes digests = new_bytes(count * kDigestBytes);
  {
    std::optional<GilReleased> released;
    if (span.size_bytes() > kReleaseGilBytes) {
      released.emplace();
    }
    engine_digests(chain, span, hash_tokens, view_of(begin), keys.views, writable(digests));
  }
  return digests;
}

nb::bytes hashes_of(const nb::bytes& root, const nb::bytes& digests, std::int64_t scale, bool in_hex) {
  const SequenceHash start = root_hash(root);
  if (digests.size() % kDigestBytes != 0 || scale < 1) {
    throw Error(ErrorCode::kLayout, std::to_string(digests.size()) + " bytes, " + std::to_string(scale) +
                                        " digests a block; a digest has " + std::to_string(kDigestBytes) + " bytes");
  }
  const auto step = static_cast<std::size_t>(scale);
  const nb::bytes hashes = new_bytes(digests.size() / kDigestBytes / step * kHashBytes);
  {
    std::optional<GilReleased> released;
    if (digests.size() > kReleaseGilBytes) {
      released.emplace();
    }
    digest_hashes(start, view_of(digests), step, in_hex, writable(hashes));
  }
  return hashes;
}

}  // namespace

void bind_engine_chains(nb::module_& module, const SharedErrors& errors) {
  const nb::object token_column = nb::module_::import_("kvbm.core.hashing").attr("token_column");
  module.def(
      "engine_digests",
      [errors, token_column](const std::string& kind, nb::handle tokens, std::int64_t hash_tokens,
                             const nb::bytes& begin, nb::handle keys) {
        return translated(errors, [&] {
          return digests_of(kind, Tokens(tokens, token_column), hash_tokens, begin, ExtraKeys(keys));
        });
      },
      nb::arg("kind"), nb::arg("tokens"), nb::arg("hash_tokens"), nb::arg("begin"), nb::arg("keys") = nb::tuple(),
      "The digests by which an engine knows a prompt's full blocks, packed, 32 bytes each.");
  module.def(
      "digest_hashes",
      [errors](const nb::bytes& root, const nb::bytes& digests, std::int64_t scale, bool in_hex) {
        return translated(errors, [&] { return hashes_of(root, digests, scale, in_hex); });
      },
      nb::arg("root"), nb::arg("digests"), nb::arg("scale") = 1, nb::arg("in_hex") = false,
      "Our hashes of blocks whose engine has these digests, packed, 16 bytes each.");
}

}  // namespace kvbm::bindings
