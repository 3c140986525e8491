// ObjectReceiver: receives objects from a store over plain HTTP, straight into the rows of their blocks.
//
// What it takes is whole and proved: the header is of the object that was asked for, and each wanted row has its
// checksum. Whatever else comes is left to the readers in Python, which find out what it is.
//
// Life: made without a connection; calls make some, which stay open for the next. close(), and the destructor, end
// calls under way and wait for them. After fork() the child must not destroy it, and receives nothing through it: its
// connections are the parent's. Threads: any. When receive() returns, nobody writes the rows any more, whatever has
// happened.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include "kvbm/event.hpp"
#include "kvbm/reader_socket.hpp"
#include "kvbm/row_copy.hpp"
#include "kvbm/spare_buffers.hpp"

namespace kvbm {

// Objects of one namespace that are wanted, and where their blocks go.
struct ObjectWish {
  std::span<const std::string> addresses;  // of the store, in digits; one at least
  std::uint16_t port = 0;                  // of all of them
  std::span<const Bytes> requests;         // one for each object, whole
  Bytes namespace_id;                      // whose blocks
  Bytes hashes;                            // of all blocks, packed, as many for each object
  std::uint8_t* base = nullptr;            // first byte of row 0
  std::ptrdiff_t stride = 0;               // bytes from the start of a row to that of the next
  std::size_t row_bytes = 0;               // of each
  std::span<const std::int64_t> rows;      // of each block; below 0: it is not wanted
  unsigned connections = 1;                // that may be used
  PeerMoment deadline;                     // after which nobody waits
  std::chrono::nanoseconds connects{0};    // how long at most until a connection stands
  std::chrono::nanoseconds is_silent{0};   // after so long without a byte nobody waits for more
};

// What became of an object.
struct ObjectAnswer {
  std::uint16_t status = 0;        // the store's; 0: it has not answered in full, or nobody has asked it
  bool is_whole = false;           // the wanted rows have their blocks
  std::uint64_t object_bytes = 0;  // of one that is whole
};

class ObjectReceiver {
 public:
  ObjectReceiver();
  ~ObjectReceiver();
  ObjectReceiver(const ObjectReceiver&) = delete;
  ObjectReceiver& operator=(const ObjectReceiver&) = delete;

  // answers: one for each object; checksums: of each block, of rows that are not wanted 0. After the first object that
  // the store has refused or not answered no other is begun.
  void receive(const ObjectWish& wish, std::span<ObjectAnswer> answers, std::span<std::uint32_t> checksums);

  // Idempotent. Receives nothing from now on. Does nothing in a forked child.
  void close() noexcept;

  bool is_of_this_process() const noexcept { return process_ == getpid(); }

 private:
  struct Connection;
  class Call;
  class Worker;

  std::unique_ptr<Connection> idle_one(const ObjectWish& wish);
  bool pick_up(Connection& connection);
  void put_down(std::unique_ptr<Connection> connection, bool is_good) noexcept;

  const pid_t process_ = getpid();                 // whose connections they are
  SpareBuffers spare_{std::size_t{64} << 20};      // for blocks as they are kept
  std::mutex lock_;                                // over what follows
  std::condition_variable changed_;                // a call has ended
  std::vector<std::unique_ptr<Connection>> idle_;  // nobody uses them; the last is the one used last
  std::vector<Connection*> in_use_;                // to be shut when all ends
  unsigned calls_ = 0;                             // under way
  bool is_closed_ = false;                         // since close()
};

}  // namespace kvbm
