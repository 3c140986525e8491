// JSON as msgspec writes it, a piece at a time. Texts are not escaped: whoever has one that would have to be is told.
// Not for several threads at once.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

namespace kvbm {

class JsonText {
 public:
  void clear() noexcept {
    told_.clear();
    is_plain_ = true;
  }

  std::string_view told() const noexcept { return told_; }
  // No text has a letter that JSON escapes.
  bool is_plain() const noexcept { return is_plain_; }

  // An object with its first field's name.
  JsonText& begin(std::string_view name) { return open('{').name(name); }
  // The name of another field.
  JsonText& field(std::string_view name) { return raw(",").name(name); }
  // The name of a field of an object that may be empty.
  JsonText& key(std::string_view name) { return item().name(name); }
  // Before something in a list.
  JsonText& item() { return told_.ends_with('[') || told_.ends_with('{') ? *this : raw(","); }

  JsonText& open(char bracket) {
    told_.push_back(bracket);
    return *this;
  }
  JsonText& close(char bracket) { return open(bracket); }

  JsonText& raw(std::string_view text) {
    told_.append(text);
    return *this;
  }

  JsonText& text(std::string_view text) {
    is_plain_ = is_plain_ && std::none_of(text.begin(), text.end(), [](char letter) {
                  return static_cast<unsigned char>(letter) < ' ' || letter == '"' || letter == '\\';
                });
    return raw("\"").raw(text).raw("\"");
  }

  JsonText& number(std::uint64_t value) {
    constexpr std::size_t kMostDigits = 20;
    char digits[kMostDigits];
    const auto end = std::to_chars(digits, digits + kMostDigits, value);
    return raw({digits, static_cast<std::size_t>(end.ptr - digits)});
  }

  JsonText& flag(bool value) { return raw(value ? "true" : "false"); }

 private:
  JsonText& name(std::string_view name) { return raw("\"").raw(name).raw("\":"); }

  std::string told_;      // so far
  bool is_plain_ = true;  // see is_plain
};

}  // namespace kvbm
