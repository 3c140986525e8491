// Checkpoints of a ClusterIndex: written while frames are applied, loaded into an empty index.
// Functions without state of their own; any thread.
//
// A checkpoint is a row of chunks of at most 1 MiB, each with its CRC-32C: first the *front* (caller's note,
// namespaces, pools, instances, as they are at the beginning), then blocks with their holders, page of the table by
// page, then the *end*.
//
//     chunk    magic 4 B, version u16, kind u16, number u32, payload bytes u32, CRC-32C of the 16 bytes before and the
//              payload u32, payload
//     front    a piece of one stream of fields: note, blocks u64; namespaces; names of pools; instances, each with its
//              name, epoch, flags, its pools in the caller's words, and for each tier snapshot u32, listed u64, flags,
//              pool u32; counts are u32, texts a u32 and bytes
//     blocks   sets u32, then each: namespace u32, members u32, each member u32: holder << 3 | is a pool << 2 | tier;
//              blocks u32, then each: hash 16 B, position of its set u32
//     end      chunks before it u32, blocks in them u64
//
// Version 2; no other is read. Whether an instance is excluded is not kept.
//
// The writer goes on meanwhile, so blocks of later pages may be newer than the front. That does no harm to whoever then
// applies all events from the front's moment on: a block whose holders changed since is changed by those events again,
// and an instance that began anew since is left out here and comes back by them. Until the moment the checkpoint ended
// is reached, digests may differ.
#pragma once

#include <cstdint>
#include <string>

#include "kvbm/cluster_index.hpp"

namespace kvbm {

inline constexpr std::size_t kMaxChunkBytes = std::size_t{1} << 20;
inline constexpr std::size_t kMaxNoteBytes = std::size_t{256} << 20;

// What was written.
struct CheckpointSize {
  std::uint64_t bytes;   // of the file
  std::uint64_t blocks;  // entries; a block may have more than one
  std::uint64_t frames;  // applied to the index before the front: whoever loads it goes on with the next
};

// Writes a checkpoint to a file descriptor, from its position on. `note` is given back by the loader.
// Throws Error: kCheckpoint, when the file does not take it, or the note is longer than kMaxNoteBytes.
CheckpointSize write_checkpoint(const ClusterIndex& index, int file, Bytes note);

// Loads a checkpoint into an index nothing was applied to. Returns the note. After an error the index is unusable.
// Throws Error: kCheckpoint, when the bytes are not a whole checkpoint, or the index is not empty.
std::string load_checkpoint(ClusterIndex& index, Bytes data);

}  // namespace kvbm
