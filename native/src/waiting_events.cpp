#include "kvbm/waiting_events.hpp"

#include <algorithm>

namespace kvbm {
namespace {

// What an event counts for in the cutting rule, as _estimated_bytes in codec.py has it.
std::size_t estimated_bytes(const Event& event, std::size_t started_namespaces) noexcept {
  return std::visit(
      [&](const auto& fact) -> std::size_t {
        if constexpr (requires { fact.slots; }) {
          return 32 + fact.hashes.size() + fact.slots.size();
        } else if constexpr (requires { fact.hashes; }) {
          return 32 + fact.hashes.size();
        } else if constexpr (requires { fact.blob; }) {
          return 256 * (1 + started_namespaces);
        } else if constexpr (requires { fact.report; }) {
          return 16 + fact.report.size();
        } else {
          return 16;
        }
      },
      event);
}

}  // namespace

void WaitingEvents::add(const Event& event, std::size_t encoded_bytes, std::uint32_t namespace_index,
                        std::uint64_t offset, std::size_t started_namespaces) {
  const NamespaceId* const id = namespace_of(event);
  Place* place = nullptr;
  if (id != nullptr) {
    if (namespace_index >= places_.size()) {
      places_.resize(namespace_index + std::size_t{1});
    }
    place = &places_[namespace_index];
  }
  const auto is_new = [&] { return place != nullptr && place->frame != frames_begun_; };
  FrameBody* body = used_ > 0 ? &bodies_[used_ - 1] : nullptr;
  const bool opens = body == nullptr || body->estimated_bytes >= kFrameEventBytes ||
                     (is_new() && body->namespaces.size() == kMaxFrameNamespaces);
  // All room is made before anything changes.
  if (opens) {
    body = &spare();
  }
  if (body->namespaces.size() == body->namespaces.capacity()) {
    body->namespaces.reserve(2 * body->namespaces.size() + 1);
  }
  if (body->used + encoded_bytes > body->bytes.size()) {
    body->bytes.resize(std::max(body->used + encoded_bytes, 2 * body->bytes.size()));
  }
  if (opens) {
    ++frames_begun_;
    ++used_;
    body->first_offset = offset;
  }
  if (is_new()) {
    *place = {frames_begun_, static_cast<std::uint8_t>(body->namespaces.size())};
    body->namespaces.push_back(*id);
  }
  write_event(event, place != nullptr ? place->index : std::uint8_t{0}, body->bytes.data() + body->used);
  body->used += encoded_bytes;
  body->estimated_bytes += estimated_bytes(event, started_namespaces);
  body->version = std::max(body->version, frame_version(event));
  ++body->event_count;
}

FrameBody& WaitingEvents::spare() {
  if (used_ == bodies_.size()) {
    bodies_.emplace_back();
  }
  FrameBody& body = bodies_[used_];
  if (body.bytes.empty()) {
    body.bytes.resize(4096);  // frames that are taken every few milliseconds stay small; others grow
  }
  body.used = body.estimated_bytes = body.event_count = 0;
  body.version = 1;
  body.namespaces.clear();
  return body;
}

}  // namespace kvbm
