// Recorder: the events a ledger has decided, from their fold to the frames they wait in. Made with a ledger, started
// once, restarted for each later epoch. Owner thread only. An event that does not fit into the room for waiting events
// ends the stream, which is an overflow: later ones are folded and not recorded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "kvbm/codec.hpp"
#include "kvbm/error.hpp"
#include "kvbm/event.hpp"
#include "kvbm/fold.hpp"
#include "kvbm/tier_slots.hpp"
#include "kvbm/waiting_events.hpp"

namespace kvbm {

inline constexpr std::size_t kMaxRunBlocks = 1024;  // of one event: it must fit a frame

inline Error ledger_error(std::string detail) { return {ErrorCode::kLedger, std::move(detail)}; }

// what: what the slot is not, and what cannot be done therefore.
inline Error slot_error(Tier tier, std::uint32_t slot, const std::string& what) {
  return Error::slot(static_cast<std::uint8_t>(tier), slot,
                     tier_name(tier) + " slot " + std::to_string(slot) + " " + what);
}

// Whether what a tier holds outlives the process.
inline bool is_durable(Tier tier) noexcept { return tier == Tier::kNvme || tier == Tier::kObject; }

class Recorder {
 public:
  // event_bytes: room for waiting events; what start, restart and stop record comes on top.
  Recorder(Fold<TierSlots> fold, std::size_t event_bytes) : fold_(std::move(fold)), event_bytes_(event_bytes) {}

  Fold<TierSlots>& fold() noexcept { return fold_; }
  const Fold<TierSlots>& fold() const noexcept { return fold_; }
  // Offset the next event gets.
  std::uint64_t applied() const noexcept { return applied_; }
  bool has_overflowed() const noexcept { return overflowed_; }
  // Whether a tier takes nothing any more, because nothing about it would be durable.
  bool is_closed(Tier tier) const noexcept { return overflowed_ && is_durable(tier); }

  // An epoch begins at offset 0: nothing is held until it is listed. event: of `namespaces` namespaces, encoded_bytes
  // long.
  void begin(std::uint64_t epoch, const InstanceStarted& event, std::size_t encoded_bytes, std::size_t namespaces);
  // The encoded size of an event, not a start, that may be recorded now. Throws Error: kLayout, kIllegalEvent.
  std::size_t admit(const Event& event) const;
  // Folds an admitted event, a legal One, and lets it wait, or overflows. namespace_index: of its namespace, if it has
  // one. where: as Fold takes it. counted: whether the event counts against the room for those that wait.
  template <class One, class Where = FindByHash>
  void record(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, Where&& where = {},
              bool counted = true) {
    const bool waits = wait(event, encoded_bytes, namespace_index, counted);
    Vacating listener{applied_};
    fold_.template apply<Legality::kKnown>(*std::get_if<One>(&event), namespace_index, where, listener);
    if (waits) {
      waiting_.set_digest(fold_.digest());
    }
  }

  // The frames that wait, but for what depends on who takes them.
  std::span<const FrameBody> waiting_frames() const noexcept { return waiting_.bodies(); }
  void clear_waiting() noexcept;

 private:
  // Has the slots of withdrawn blocks follow the fold.
  struct Vacating {
    std::uint64_t applied;  // after the event

    void on_begun(std::size_t) noexcept {}
    void on_gained(TierSlots&) noexcept {}
    void on_lost(TierSlots& tier, std::uint32_t slot) noexcept { tier.vacate(slot, applied); }
    void on_claimed(std::size_t) noexcept {}
    void on_unclaimed(std::size_t) noexcept {}
  };

  bool wait(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index, bool counted);

  Fold<TierSlots> fold_;           // of all events
  WaitingEvents waiting_;          // those that were not taken yet
  std::size_t event_bytes_;        // room for them
  std::size_t waiting_bytes_ = 0;  // encoded size of those that count
  std::uint64_t applied_ = 0;      // offset the next event gets
  bool overflowed_ = false;        // nothing is recorded any more
};

}  // namespace kvbm
