// Computes every case of kvbm's hash_vectors.json from its inputs and compares.
//   cc -std=c17 -Wall -Wextra -O2 hash_vectors.c -lcrypto -o hash_vectors
//   ./hash_vectors hash_vectors.json
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Noreturn static void fail(const char* why) {
  fprintf(stderr, "hash_vectors: %s\n", why);
  exit(1);
}

// ---- Memory: all of it is given back at exit.

struct chunk {
  struct chunk* next;
  max_align_t data[];
};
static struct chunk* chunks;

static void give_back(void) {
  while (chunks) {
    struct chunk* next = chunks->next;
    free(chunks);
    chunks = next;
  }
}

static void* take(size_t size) {  // zeroed
  struct chunk* chunk = calloc(1, sizeof *chunk + size);
  if (!chunk)
    fail("out of memory");
  chunk->next = chunks;
  chunks = chunk;
  return chunk->data;
}

// Bytes that grow. They may contain zeros: a model's name can.
struct bytes {
  unsigned char* data;
  size_t length, room;
};

static void append(struct bytes* to, const void* data, size_t length) {
  if (to->room - to->length < length || !to->data) {
    size_t room = 2 * (to->length + length) + 16;
    unsigned char* larger = take(room);
    if (to->length)
      memcpy(larger, to->data, to->length);
    to->data = larger;
    to->room = room;
  }
  if (length)
    memcpy(to->data + to->length, data, length);
  to->length += length;
}

static void append_text(struct bytes* to, const char* text) { append(to, text, strlen(text)); }

static bool same(struct bytes a, const void* data, size_t length) {
  return a.length == length && (length == 0 || memcmp(a.data, data, length) == 0);
}

// ---- JSON. A number stays text, so no seed is too large.

enum type { STRING, NUMBER, WORD, ARRAY, OBJECT };

struct value {
  enum type type;
  struct bytes text;           // of a string (unescaped), a number or a word
  struct bytes key;            // of an object's member
  struct value *first, *next;  // what an array or an object has; the one beside
  size_t count;
};

static const char *at, *end;  // what is still to be read; *end is a zero byte

static void skip_spaces(void) { at += strspn(at, " \t\n\r"); }

static bool accept(char c) {
  if (*at != c || at == end)
    return false;
  at++;
  return true;
}

static void expect(char c) {
  skip_spaces();
  if (!accept(c))
    fail("not JSON");
  skip_spaces();
}

static int hex_digit(int c) {
  if (c >= '0' && c <= '9')
    return c - '0';
  if (c >= 'a' && c <= 'f')
    return c - 'a' + 10;
  if (c >= 'A' && c <= 'F')
    return c - 'A' + 10;
  return -1;
}

static unsigned parse_unit(void) {  // the four digits after \u
  unsigned unit = 0;
  for (int i = 0; i < 4; i++) {
    int digit = hex_digit((unsigned char)*at);
    if (digit < 0)
      fail("bad \\u in a text");
    unit = unit * 16 + (unsigned)digit;
    at++;
  }
  return unit;
}

static void append_utf8(struct bytes* to, unsigned c) {
  unsigned char out[4];
  size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  static const unsigned char lead[] = {0, 0, 0xC0, 0xE0, 0xF0};
  for (size_t i = length; i-- > 1; c >>= 6)
    out[i] = 0x80 | (c & 0x3F);
  out[0] = (unsigned char)(lead[length] | c);
  append(to, out, length);
}

static struct bytes parse_string(void) {
  struct bytes text = {0};
  if (!accept('"'))
    fail("a text was expected");
  while (!accept('"')) {
    if ((unsigned char)*at < 0x20)
      fail("a text has no end, or a control character");
    if (!accept('\\')) {
      append(&text, at++, 1);
    } else if (accept('u')) {
      unsigned c = parse_unit();
      if (c >= 0xD800 && c <= 0xDFFF) {  // half of a pair
        if (c > 0xDBFF || !accept('\\') || !accept('u'))
          fail("a lone surrogate");
        unsigned low = parse_unit();
        if (low < 0xDC00 || low > 0xDFFF)
          fail("a lone surrogate");
        c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
      }
      append_utf8(&text, c);
    } else {
      static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
      const char* letter = *at ? strchr(letters, *at) : NULL;
      if (!letter)
        fail("bad escape in a text");
      append(&text, meant + (letter - letters), 1);
      at++;
    }
  }
  return text;
}

static struct bytes parse_number(void) {  // a whole one: the file has no others
  const char* begin = at;
  accept('-');
  if (!accept('0')) {
    size_t length = strspn(at, "0123456789");
    if (length == 0)
      fail("not JSON");
    at += length;
  }
  struct bytes text = {0};
  append(&text, begin, (size_t)(at - begin));
  return text;
}

static struct value* parse_value(int depth) {
  struct value* value = take(sizeof *value);
  if (depth > 32)
    fail("nested too deep");
  if (*at == '"') {
    value->type = STRING;
    value->text = parse_string();
  } else if (*at == '[' || *at == '{') {
    value->type = *at == '{' ? OBJECT : ARRAY;
    char close = *at == '{' ? '}' : ']';
    struct value** link = &value->first;
    expect(*at);
    while (*at != close) {
      struct bytes key = {0};
      if (value->count > 0)
        expect(',');
      if (value->type == OBJECT) {
        key = parse_string();
        expect(':');
      }
      *link = parse_value(depth + 1);
      (*link)->key = key;
      link = &(*link)->next;
      value->count++;
      skip_spaces();
    }
    at++;
  } else if (*at == 't' || *at == 'f' || *at == 'n') {
    const char* word = *at == 't' ? "true" : *at == 'f' ? "false" : "null";
    if (strncmp(at, word, strlen(word)) != 0)
      fail("not JSON");
    value->type = WORD;
    append_text(&value->text, word);
    at += strlen(word);
  } else {
    value->type = NUMBER;
    value->text = parse_number();
  }
  return value;
}

// ---- What a case has. `sound` turns false where something is missing or of a wrong type.

static bool sound;

static const struct value* get(const struct value* object, const char* key, enum type type) {
  static const struct value none;
  for (const struct value* one = object->first; one; one = one->next)
    if (same(one->key, key, strlen(key)) && one->type == type)
      return one;
  sound = false;
  return &none;
}

static struct bytes from_hex(const struct value* value) {
  struct bytes out = {0};
  append(&out, "", 0);  // no null pointer even where empty: HMAC() wants none
  if (value->type != STRING || value->text.length % 2 != 0)
    sound = false;
  for (size_t i = 0; sound && i < value->text.length; i += 2) {
    int high = hex_digit(value->text.data[i]), low = hex_digit(value->text.data[i + 1]);
    if (high < 0 || low < 0)
      sound = false;
    unsigned char byte = (unsigned char)(high * 16 + low);
    append(&out, &byte, 1);
  }
  return out;
}

static uint32_t to_uint32(const struct value* value) {
  uint64_t number = 0;
  if (value->type != NUMBER)
    sound = false;
  for (size_t i = 0; sound && i < value->text.length; i++) {
    int c = value->text.data[i];
    if (c < '0' || c > '9')
      return sound = false;
    number = number * 10 + (uint64_t)(c - '0');
    if (number > UINT32_MAX)
      sound = false;
  }
  return (uint32_t)number;
}

static bool is_hex_of(const unsigned char* hash, const struct value* expected) {
  char hex[33];
  for (int i = 0; i < 16; i++)
    snprintf(hex + 2 * i, 3, "%02x", hash[i]);
  return expected && expected->type == STRING && same(expected->text, hex, 32);
}

// ---- The algorithm.

static void append_escaped(struct bytes* to, struct bytes text) {
  append_text(to, "\"");
  for (size_t i = 0; i < text.length; i++) {
    unsigned char c = text.data[i];
    char escape[8];
    static const char plain[] = "\"\\\b\f\n\r\t", letters[] = "\"\\bfnrt";
    const char* found = c ? strchr(plain, c) : NULL;
    if (found) {
      snprintf(escape, sizeof escape, "\\%c", letters[found - plain]);
      append_text(to, escape);
    } else if (c < 0x20) {
      snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
      append_text(to, escape);
    } else {
      append(to, &c, 1);  // UTF-8 stands as it is
    }
  }
  append_text(to, "\"");
}

static bool is_whole(struct bytes text) {
  bool is_negative = text.length > 0 && text.data[0] == '-';
  for (size_t i = is_negative; i < text.length; i++)
    if (text.data[i] < '0' || text.data[i] > '9')
      return false;
  return text.length > (size_t)is_negative;
}

static bool seed_is_text;  // in the list `seeds`: there it may be larger than a double holds

static struct bytes canonical_form(const struct value* fields) {
  static const struct {
    const char* name;
    enum type type;
  } sorted[] = {
      {"block_tokens", NUMBER}, {"kv_dtype", STRING},    {"kv_group", NUMBER}, {"layout", STRING},
      {"lora", STRING},         {"model", STRING},       {"ranks", STRING},    {"revision", STRING},
      {"scheme", STRING},       {"scheme_seed", NUMBER}, {"tenant", STRING},
  };
  struct bytes out = {0};
  for (size_t i = 0; i < sizeof sorted / sizeof *sorted; i++) {
    bool is_seed = strcmp(sorted[i].name, "scheme_seed") == 0;
    const struct value* value = get(fields, sorted[i].name, is_seed && seed_is_text ? STRING : sorted[i].type);
    append_text(&out, i == 0 ? "{\"" : ",\"");
    append_text(&out, sorted[i].name);
    append_text(&out, "\":");
    if (is_seed && !is_whole(value->text))
      sound = false;
    if (value->type == STRING && !is_seed)
      append_escaped(&out, value->text);
    else
      append(&out, value->text.data, value->text.length);
  }
  append_text(&out, "}");
  return out;
}

static bool check_namespace(const struct value* one) {
  struct bytes canonical = canonical_form(get(one, "fields", OBJECT));
  struct bytes secret = from_hex(get(one, "secret", STRING));
  struct bytes expected = get(one, "canonical", STRING)->text;
  // The names end in a zero byte, which is hashed too: sizeof counts it, strlen does not.
  static const char id_name[] = "kvbm.namespace.v1", root_name[] = "kvbm.root.v1";
  unsigned char id[32], root[32];
  struct bytes message = {0};
  append(&message, id_name, sizeof id_name);
  append(&message, canonical.data, canonical.length);
  SHA256(message.data, message.length, id);
  message.length = 0;
  append(&message, root_name, sizeof root_name);
  append(&message, canonical.data, canonical.length);
  HMAC(EVP_sha256(), secret.data, (int)secret.length, message.data, message.length, root, NULL);
  return same(canonical, expected.data, expected.length) && is_hex_of(id, get(one, "id", STRING)) &&
         is_hex_of(root, get(one, "root", STRING));
}

static bool check_prompt(const struct value* one) {
  struct bytes parent = from_hex(get(one, "root", STRING));
  size_t block_tokens = to_uint32(get(one, "block_tokens", NUMBER));
  const struct value *tokens = get(one, "tokens", ARRAY), *token = tokens->first;
  const struct value* extra = get(one, "extra_keys", ARRAY)->first;
  const struct value *hashes = get(one, "hashes", ARRAY), *expected = hashes->first;
  if (!sound || block_tokens == 0)
    return false;
  size_t blocks = tokens->count / block_tokens;  // the rest is dropped
  if (hashes->count != blocks)
    return false;
  for (; expected; expected = expected->next) {
    unsigned char hash[32];
    struct bytes message = {0};
    append(&message, parent.data, parent.length);
    for (size_t i = 0; i < block_tokens; i++, token = token->next) {
      uint32_t id = to_uint32(token);
      for (int shift = 0; shift < 32; shift += 8) {  // little-endian on any machine
        unsigned char byte = id >> shift & 255;
        append(&message, &byte, 1);
      }
    }
    if (extra) {
      struct bytes key = from_hex(extra);
      append(&message, key.data, key.length);
      extra = extra->next;
    }
    SHA256(message.data, message.length, hash);
    if (!is_hex_of(hash, expected))
      return false;
    parent.length = 0;
    append(&parent, hash, 16);
  }
  return true;
}

static bool check_derived(const struct value* one) {
  struct bytes root = from_hex(get(one, "root", STRING));
  const struct value *digests = get(one, "digests", ARRAY), *digest = digests->first;
  const struct value *hashes = get(one, "hashes", ARRAY), *expected = hashes->first;
  if (digests->count != hashes->count)
    return false;
  for (; digest; digest = digest->next, expected = expected->next) {
    unsigned char hash[32];
    struct bytes message = {0}, of_engine = from_hex(digest);
    append(&message, root.data, root.length);
    append(&message, of_engine.data, of_engine.length);
    SHA256(message.data, message.length, hash);
    if (!is_hex_of(hash, expected))
      return false;
  }
  return true;
}

// ---- The file.

static bool check_list(const struct value* vectors, const char* kind, bool (*check)(const struct value*)) {
  sound = true;
  const struct value* cases = get(vectors, kind, ARRAY);
  if (!sound)
    fail("a list is missing");
  size_t right = 0;
  struct bytes wrong = {0};
  for (const struct value* one = cases->first; one; one = one->next) {
    sound = true;
    if (check(one) && sound) {
      right++;
      continue;
    }
    struct bytes name = get(one, "name", STRING)->text;
    append_text(&wrong, "  wrong: ");
    append(&wrong, name.data, name.length);
    append_text(&wrong, "\n");
  }
  printf("%s: %zu of %zu right\n", kind, right, cases->count);
  if (wrong.length)
    fwrite(wrong.data, 1, wrong.length, stdout);
  return right == cases->count && right > 0;  // no cases prove nothing
}

int main(int argc, char** argv) {
  atexit(give_back);
  FILE* file = argc == 2 ? fopen(argv[1], "rb") : NULL;
  if (!file)
    fail("give the path of the vectors' file");
  struct bytes text = {0};
  char part[4096];
  for (size_t got; (got = fread(part, 1, sizeof part, file)) > 0;)
    append(&text, part, got);
  fclose(file);
  append(&text, "", 1);  // the zero byte at the end
  at = (const char*)text.data;
  end = at + text.length - 1;
  skip_spaces();
  const struct value* vectors = parse_value(0);
  skip_spaces();
  if (at != end)
    fail("not JSON");

  bool namespaces = check_list(vectors, "namespaces", check_namespace);
  seed_is_text = true;
  bool seeds = check_list(vectors, "seeds", check_namespace);
  bool prompts = check_list(vectors, "prompts", check_prompt);
  bool derived = check_list(vectors, "derived", check_derived);
  return namespaces && seeds && prompts && derived ? 0 : 1;
}
