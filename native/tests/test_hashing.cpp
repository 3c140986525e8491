#include "kvbm/hashing.hpp"

#include <algorithm>
#include <thread>

#include "check.hpp"

using namespace kvbm;
using tests::Random;

namespace {

using Buffer = std::vector<std::uint8_t>;

std::vector<HashKernel> backend() {
  std::vector<HashKernel> found;
  for (const HashKernel kernel : {HashKernel::kPortable, HashKernel::kAvx2, HashKernel::kSha}) {
    if (has_hash_kernel(kernel)) {
      found.push_back(kernel);
    }
  }
  return found;
}

std::vector<std::uint32_t> random_tokens(Random& random, std::size_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::generate(tokens.begin(), tokens.end(), [&] { return static_cast<std::uint32_t>(random.next()); });
  return tokens;
}

SequenceHash random_root(Random& random) {
  SequenceHash root;
  std::ranges::copy(random.bytes(kHashBytes), root.begin());
  return root;
}

Buffer chain(std::span<const std::uint32_t> tokens, std::size_t block_tokens, const SequenceHash& root,
             std::span<const Bytes> keys = {}, HashKernel kernel = fastest_hash_kernel()) {
  Buffer out(tokens.size() / block_tokens * kHashBytes);
  sequence_hashes(tokens, block_tokens, root, keys, out, kernel);
  return out;
}

// What the chain is by its definition: SHA-256 over parent and tokens, block by block.
Buffer defined_chain(std::span<const std::uint32_t> tokens, std::size_t block_tokens, SequenceHash parent) {
  Buffer out;
  for (; tokens.size() >= block_tokens; tokens = tokens.subspan(block_tokens)) {
    Sha256 sha(sha256_compress_portable);
    sha.update(parent);
    sha.update({reinterpret_cast<const std::uint8_t*>(tokens.data()), block_tokens * sizeof(std::uint32_t)});
    const auto digest = sha.finish();
    std::copy_n(digest.begin(), kHashBytes, parent.begin());
    out.insert(out.end(), parent.begin(), parent.end());
  }
  return out;
}

void kernels_agree() {
  Random random(2);
  for (std::size_t block_tokens = 1; block_tokens < 70; ++block_tokens) {
    const auto tokens = random_tokens(random, 7 * block_tokens + random.below(block_tokens));
    const SequenceHash root = random_root(random);
    const Buffer expected = defined_chain(tokens, block_tokens, root);
    for (const HashKernel kernel : backend()) {
      CHECK(chain(tokens, block_tokens, root, {}, kernel) == expected);
    }
  }
  for (const HashKernel kernel : backend()) {
    CHECK(chain(random_tokens(random, 500), 501, {}, {}, kernel).empty());
    CHECK(chain({}, 16, {}, {}, kernel).empty());
  }
}

void chains_continue() {
  Random random(3);
  const auto tokens = random_tokens(random, 500);
  const Buffer whole = chain(tokens, 16, SequenceHash{1, 2, 3});
  SequenceHash first;
  std::copy_n(whole.begin(), kHashBytes, first.begin());
  const Buffer rest = chain(std::span(tokens).subspan(16), 16, first);
  CHECK(std::equal(rest.begin(), rest.end(), whole.begin() + kHashBytes, whole.end()));
}

void batches_are_chains() {
  Random random(4);
  for (const HashKernel kernel : backend()) {
    for (std::size_t count = 0; count <= 20; ++count) {  // fewer jobs than lanes, as many, more
      for (const std::size_t block_tokens : {std::size_t{1}, std::size_t{3}, std::size_t{11}, std::size_t{12},
                                             std::size_t{16}, std::size_t{25}, std::size_t{64}}) {
        std::vector<std::vector<std::uint32_t>> prompts;
        std::vector<Buffer> hashes;
        std::vector<Buffer> expected;
        std::vector<HashJob> jobs;
        for (std::size_t number = 0; number < count; ++number) {
          const std::size_t blocks = random.below(4) == 0 ? 0 : random.below(12);
          prompts.push_back(random_tokens(random, blocks * block_tokens + random.below(block_tokens)));
          hashes.emplace_back(blocks * kHashBytes);
        }
        for (std::size_t number = 0; number < count; ++number) {
          const SequenceHash root = random_root(random);
          jobs.push_back({.tokens = prompts[number], .root = root, .out = hashes[number].data()});
          expected.push_back(defined_chain(prompts[number], block_tokens, root));
        }
        sequence_hashes_batch(jobs, block_tokens, kernel);
        CHECK(hashes == expected);
      }
    }
  }
}

void derived_hashes_are_their_definition() {
  Random random(5);
  const SequenceHash root = random_root(random);
  for (const HashKernel kernel : backend()) {
    for (std::size_t snapshot = 0; snapshot < 300; ++snapshot) {
      const std::size_t count = random.below(20);
      const std::size_t most = 1 + random.below(140);  // past two chunks
      std::vector<Buffer> digests;
      std::size_t bytes = random.below(most);
      for (std::size_t number = 0; number < count; ++number) {  // runs of one length, as many as lanes, fewer, more
        bytes = random.below(4) == 0 ? random.below(most) : bytes;
        digests.push_back(random.bytes(bytes));
      }
      Buffer expected;
      for (const Buffer& digest : digests) {
        Sha256 sha(sha256_compress_portable);
        sha.update(root);
        sha.update(digest);
        const auto whole = sha.finish();
        expected.insert(expected.end(), whole.begin(), whole.begin() + kHashBytes);
      }
      const std::vector<Bytes> views(digests.begin(), digests.end());
      Buffer out(count * kHashBytes);
      derived_hashes(root, views, out, kernel);
      CHECK(out == expected);
    }
  }
}

void extra_keys() {
  const std::vector<std::uint32_t> tokens(12);
  const SequenceHash root{};
  const Buffer key(200, 7);
  const std::vector<Bytes> none(3);
  const std::vector<Bytes> second{Bytes{}, Bytes(key), Bytes{}};
  const Buffer portable = chain(tokens, 4, root, second, HashKernel::kPortable);
  for (const HashKernel kernel : backend()) {
    const Buffer plain = chain(tokens, 4, root, {}, kernel);
    const Buffer keyed = chain(tokens, 4, root, second, kernel);
    CHECK(keyed == portable);
    CHECK(plain == chain(tokens, 4, root, none, kernel));
    CHECK(std::equal(plain.begin(), plain.begin() + 16, keyed.begin()));
    CHECK(!std::equal(plain.begin() + 16, plain.begin() + 32, keyed.begin() + 16));
    CHECK(!std::equal(plain.begin() + 32, plain.end(), keyed.begin() + 32));
  }
}

void threads_share_it() {
  std::vector<Buffer> results(4);
  std::vector<std::thread> threads;
  const std::vector<std::uint32_t> tokens(4'096, 9);
  for (auto& result : results) {
    threads.emplace_back([&] { result = chain(tokens, 16, SequenceHash{}); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK(results[0] == results[1] && results[1] == results[2] && results[2] == results[3]);
}

}  // namespace

int main() {
  return tests::run(
      {{"every kernel hashes blocks of every size as the definition says", kernels_agree},
       {"a chain continues from any of its hashes", chains_continue},
       {"a batch of any lengths is its chains", batches_are_chains},
       {"a derived hash is that of the root and the digest, of any length", derived_hashes_are_their_definition},
       {"an extra key changes its block and all after it", extra_keys},
       {"threads may hash at once", threads_share_it}});
}
