// The launch of DeviceRing: pieces of blocks, where an engine keeps them ↔ the same bytes one after another in a ring.
// tools/ring_kernel.py compiles it to PTX, which lies in native/src/ring_kernel_ptx.inc and is made machine code by the
// driver; the tests' stand-in for a driver runs these very lines on a CPU. A warp copies a piece; no thread waits for
// another.

struct Piece {
  unsigned long long address;  // of slot 0's bytes
  unsigned long long stride;   // bytes from one slot's to the next one's
  unsigned long long offset;   // in a block
  unsigned long long bytes;    // at most kPieceBytes
};

// What a lot of a run is: pieces in the order of the run's bytes, from piece `piece` of block `block` on.
struct Lot {
  unsigned long long ring;         // address of the lot's first byte
  unsigned long long begin;        // that byte's offset in the run
  unsigned long long block;        // number of the first block in the run
  unsigned long long block_bytes;  // of each block
  unsigned int piece;              // of the first block, the first
  unsigned int pieces;             // in the lot
  unsigned int pieces_a_block;
  unsigned int gathers;  // 1: into the ring, 0: out of it
};

#ifdef __CUDACC__
#define KVBM_UNROLL _Pragma("unroll")
#else
#define KVBM_UNROLL
#endif
#define KVBM_LANES 32u
#define KVBM_DEEP 8u  // loads of a thread under way at once

template <class Word>
__device__ void copy_words(char* to, const char* from, unsigned int bytes, unsigned int lane) {
  Word* const target = reinterpret_cast<Word*>(to);
  const Word* const source = reinterpret_cast<const Word*>(from);
  const unsigned int words = bytes / static_cast<unsigned int>(sizeof(Word));
  unsigned int word = lane;
  for (; word + (KVBM_DEEP - 1) * KVBM_LANES < words; word += KVBM_DEEP * KVBM_LANES) {
    Word held[KVBM_DEEP];
    KVBM_UNROLL
    for (unsigned int turn = 0; turn < KVBM_DEEP; ++turn) {
      held[turn] = source[word + turn * KVBM_LANES];
    }
    KVBM_UNROLL
    for (unsigned int turn = 0; turn < KVBM_DEEP; ++turn) {
      target[word + turn * KVBM_LANES] = held[turn];
    }
  }
  for (; word < words; word += KVBM_LANES) {
    target[word] = source[word];
  }
}

extern "C" __global__ void kvbm_ring(const Piece* pieces, const long long* slots, Lot lot) {
  const unsigned int warps = blockDim.x / KVBM_LANES;
  const unsigned int lane = threadIdx.x % KVBM_LANES;
  const unsigned int first = blockIdx.x * warps + threadIdx.x / KVBM_LANES;
  for (unsigned int number = first; number < lot.pieces; number += gridDim.x * warps) {
    const unsigned int counted = lot.piece + number;
    const unsigned long long block = lot.block + counted / lot.pieces_a_block;
    const Piece piece = pieces[counted % lot.pieces_a_block];
    const unsigned long long slot = static_cast<unsigned long long>(slots[block]);
    char* const there = reinterpret_cast<char*>(piece.address + slot * piece.stride);
    char* const here = reinterpret_cast<char*>(lot.ring + (block * lot.block_bytes + piece.offset - lot.begin));
    char* const to = lot.gathers ? here : there;
    const char* const from = lot.gathers ? there : here;
    const unsigned int bytes = static_cast<unsigned int>(piece.bytes);
    const unsigned long long together =
        reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from) | piece.bytes;
    if (together % 16 == 0) {
      copy_words<uint4>(to, from, bytes, lane);
    } else if (together % 4 == 0) {
      copy_words<unsigned int>(to, from, bytes, lane);
    } else {
      copy_words<unsigned char>(to, from, bytes, lane);
    }
  }
}
