// PeerMapping: the memory of another instance's HOST pool, mapped for reading by the descriptor it sent.
//
// Life: the constructor maps, the destructor unmaps; core dumps leave it out. Its bytes change whenever their owner
// writes them, so only a copy of them can be judged. Threads: any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "kvbm/reader_socket.hpp"
#include "kvbm/peer_wire.hpp"
#include "kvbm/row_copy.hpp"

namespace kvbm {

class PeerMapping {
 public:
  // Throws PeerTrouble: the file is smaller than was said, may be shortened (a reader would be killed), or cannot be
  // mapped.
  PeerMapping(const PeerArena& shape, const PeerDescriptor& file);
  ~PeerMapping();
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;

  std::uint32_t slots() const noexcept { return shape_.slots; }
  std::uint64_t stride() const noexcept { return shape_.stride; }
  // The slots as rows; `at` names slots below slots().
  SourceRows rows(const std::int64_t* at) const noexcept {
    return {data_, static_cast<std::ptrdiff_t>(shape_.stride), at};
  }
  // Whether this is that memory.
  bool is_of(const PeerArena& shape, const PeerDescriptor& file) const;

 private:
  PeerArena shape_;                     // what its owner says of it
  std::uint64_t device_ = 0;            // of the file
  std::uint64_t file_ = 0;              // its number there
  std::uint8_t* room_ = nullptr;        // addresses that were taken
  std::size_t room_bytes_ = 0;          // of room_
  const std::uint8_t* data_ = nullptr;  // the mapping, within room_
};

// The mapping that the connections of one reader share: an owner's memory is mapped once, and no longer than one of
// them lives. Any thread.
class SharedMapping {
 public:
  // The mapping of this file, the one that is there or a new one. Throws PeerTrouble.
  std::shared_ptr<const PeerMapping> of(const PeerArena& shape, const PeerDescriptor& file);

 private:
  std::mutex lock_;                          // over what follows
  std::weak_ptr<const PeerMapping> latest_;  // none before the first, and once no connection has it
};

}  // namespace kvbm
