#include "kvbm/foreign_message.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"

using namespace kvbm;

namespace {

using Buffer = std::vector<std::uint8_t>;

void put(Buffer& out, std::string_view text) {
  out.push_back(static_cast<std::uint8_t>(0xA0 | text.size()));
  out.insert(out.end(), text.begin(), text.end());
}

void put(Buffer& out, std::initializer_list<int> bytes) {
  for (const int byte : bytes) {
    out.push_back(static_cast<std::uint8_t>(byte));
  }
}

// [1.5, [event], 0], where the event is a map of `fields` with its type, and `rest` behind that.
Buffer message(std::string_view type, int fields, const Buffer& rest) {
  Buffer out;
  put(out, {0x93, 0xCB, 0x3F, 0xF8, 0, 0, 0, 0, 0, 0, 0x91, 0x80 | fields});
  put(out, "type");
  put(out, type);
  out.insert(out.end(), rest.begin(), rest.end());
  put(out, {0});
  return out;
}

// A stored event whose keys are an array of `keys`.
Buffer stored(std::initializer_list<int> keys, std::initializer_list<int> tokens) {
  Buffer rest;
  put(rest, "block_hashes");
  put(rest, keys);
  put(rest, "token_ids");
  put(rest, tokens);
  put(rest, "block_size");
  put(rest, {2});
  return message("BlockStored", 4, rest);
}

void every_integer_has_its_value_and_kind() {
  struct Case {
    std::initializer_list<int> bytes;  // an array of one
    std::uint64_t value;
    KeyKind kind;
  };
  const Case cases[] = {
      {{0x91, 0x7F}, 127, KeyKind::kNatural},
      {{0x91, 0xCC, 0xFF}, 255, KeyKind::kNatural},
      {{0x91, 0xCD, 1, 0}, 256, KeyKind::kNatural},
      {{0x91, 0xCE, 0xFF, 0xFF, 0xFF, 0xFF}, 0xFFFFFFFF, KeyKind::kNatural},
      {{0x91, 0xCF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFE}, ~std::uint64_t{1}, KeyKind::kNatural},
      {{0x91, 0xFF}, ~std::uint64_t{0}, KeyKind::kNegative},
      {{0x91, 0xD0, 0x80}, ~std::uint64_t{127}, KeyKind::kNegative},
      {{0x91, 0xD1, 0x80, 0}, ~std::uint64_t{0x7FFF}, KeyKind::kNegative},
      {{0x91, 0xD2, 0xFF, 0xFF, 0xFF, 0xFE}, ~std::uint64_t{1}, KeyKind::kNegative},
      {{0x91, 0xD3, 0x80, 0, 0, 0, 0, 0, 0, 0}, std::uint64_t{1} << 63, KeyKind::kNegative},
      {{0x91, 0xD0, 5}, 5, KeyKind::kNatural},
  };
  ForeignMessage read;
  for (const Case& one : cases) {
    const Buffer data = stored(one.bytes, {0x92, 1, 0xCE, 0xFF, 0xFF, 0xFF, 0xFF});
    CHECK(read.read(data) && read.events().size() == 1 && read.rank() == 0);
    const ForeignEvent& event = read.events()[0];
    CHECK(event.kind == ForeignEvent::Kind::kStored && event.block_tokens == 2 && !event.has_parent);
    CHECK(read.keys(event)[0].value == one.value && read.keys(event)[0].kind == one.kind);
    CHECK(read.tokens(event)[0] == 1 && read.tokens(event)[1] == 0xFFFFFFFF);
  }
  const Buffer data = stored({0x91, 0xC4, 3, 'a', 'b', 'c'}, {0x90});
  CHECK(read.read(data) && read.keys(read.events()[0])[0].wide.size() == 3);
}

void what_is_cut_or_has_something_behind_it_is_not_read() {
  const Buffer whole = stored({0x92, 1, 0xCF, 1, 2, 3, 4, 5, 6, 7, 8}, {0x92, 1, 0xCD, 1, 2});
  ForeignMessage read;
  CHECK(read.read(whole));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const Buffer cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
    CHECK(!read.read(cut));
  }
  Buffer longer = whole;
  longer.push_back(0xC0);
  CHECK(!read.read(longer));
}

void what_is_unusual_is_not_read() {
  ForeignMessage read;
  CHECK(!read.read(stored({0x91, 0xA1, 'k'}, {0x90})));                        // a text for a key
  CHECK(!read.read(stored({0x91, 0xC4, 0}, {0x90})));                          // an empty one
  CHECK(!read.read(stored({0x91, 1}, {0x91, 0xFF})));                          // a token below 0
  CHECK(!read.read(stored({0x91, 1}, {0x91, 0xCF, 0, 0, 0, 1, 0, 0, 0, 0})));  // one beyond 32 bits
  CHECK(!read.read(stored({0xDD, 0xFF, 0xFF, 0xFF, 0xFF, 1}, {0x90})));        // more keys than bytes
  CHECK(!read.read(message("BlockMoved", 1, {})));
  Buffer medium;
  put(medium, "block_hashes");
  put(medium, {0x90});
  put(medium, "medium");
  put(medium, "TAPE");
  CHECK(!read.read(message("BlockRemoved", 3, medium)));
  Buffer twice;
  for (int time = 0; time < 2; ++time) {
    put(twice, "block_hashes");
    put(twice, {0x90});
  }
  CHECK(!read.read(message("BlockRemoved", 3, twice)));
  CHECK(!read.read(message("BlockRemoved", 1, {})));  // nothing says which blocks
}

void what_says_nothing_is_passed_over() {
  Buffer rest;
  put(rest, "session_id");
  put(rest, "s");
  put(rest, "locality");
  put(rest, {0xC0});
  put(rest, "block_hashes");
  put(rest, {0x91, 1});
  put(rest, "medium");
  put(rest, "CPU");
  put(rest, "token_ids");
  put(rest, {0xCB, 0, 0, 0, 0, 0, 0, 0, 0});
  ForeignMessage read;
  const Buffer data = message("BlockRemoved", 6, rest);
  CHECK(read.read(data) && read.events()[0].tier == Tier::kHost && read.events()[0].key_count == 1);
  const Buffer cleared = message("AllBlocksCleared", 1, {});
  CHECK(read.read(cleared) && read.events()[0].kind == ForeignEvent::Kind::kCleared);
}

// A message of so many removed events of 2^20 blocks each.
Buffer removed_often(int events) {
  constexpr std::size_t kKeys = std::size_t{1} << 20;
  Buffer out;
  put(out, {0x93, 0xCB, 0x3F, 0xF8, 0, 0, 0, 0, 0, 0, 0x90 | events});
  for (int event = 0; event < events; ++event) {
    put(out, {0x82});
    put(out, "type");
    put(out, "BlockRemoved");
    put(out, "block_hashes");
    put(out, {0xDD, 0, 0x10, 0, 0});
    out.resize(out.size() + kKeys);
  }
  put(out, {0});
  return out;
}

void a_large_message_is_read_while_its_keys_are_not_too_many() {
  ForeignMessage read;
  CHECK(read.read(removed_often(4)));
  CHECK(read.events().size() == 4);
  CHECK(read.keys(read.events()[3]).size() == std::size_t{1} << 20);
  CHECK(!read.read(removed_often(5)));
}

}  // namespace

int main() {
  return tests::run({
      {"every integer has its value and kind", every_integer_has_its_value_and_kind},
      {"what is cut or has something behind it is not read", what_is_cut_or_has_something_behind_it_is_not_read},
      {"what is unusual is not read", what_is_unusual_is_not_read},
      {"what says nothing is passed over", what_says_nothing_is_passed_over},
      {"a large message is read while its keys are not too many",
       a_large_message_is_read_while_its_keys_are_not_too_many},
  });
}
