#include "kvbm/foreign_ledger.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frames.hpp"
#include "kvbm/entropy.hpp"
#include "python.hpp"
#include "tokens.hpp"
#include "waiting_frames.hpp"

namespace kvbm::bindings {
namespace {

// The Python classes of a ledger's frames, and what tokens go through. Made once at import, immutable; GIL held.
struct ForeignClasses {
  SharedClasses frames = frame_classes();
  nb::object frame_bytes = nb::module_::import_("kvbm.core.codec").attr("FrameBytes");
  nb::object token_column = nb::module_::import_("kvbm.core.hashing").attr("token_column");
};

Tier tier_of(nb::handle tier) {
  const auto value = number<std::uint8_t>(tier);
  if (value >= kTierCount) {
    throw nb::value_error("no such tier");
  }
  return static_cast<Tier>(value);
}

// An engine's hashes of blocks: ints of any size, and bytes.
class Keys {
 public:
  explicit Keys(nb::handle keys) {
    for (nb::handle key : keys) {
      add(key);
    }
  }

  std::span<const ForeignKey> all() const noexcept { return keys_; }

  void add(nb::handle key) {
    if (PyBytes_Check(key.ptr())) {
      keys_.push_back({.value = 0, .wide = kept_bytes(nb::borrow(key), keepers_), .kind = KeyKind::kWide});
      return;
    }
    if (!PyLong_Check(key.ptr())) {
      throw nb::type_error("an engine's hash of a block is an int or bytes");
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(key.ptr(), &overflow);
    ForeignKey made{.value = static_cast<std::uint64_t>(value), .wide = {}, .kind = KeyKind::kNatural};
    if (overflow == 0) {
      made.kind = value < 0 ? KeyKind::kNegative : KeyKind::kNatural;
    } else {
      made.value = overflow > 0 ? PyLong_AsUnsignedLongLong(key.ptr()) : 0;
      if (overflow < 0 || PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        const std::string text = nb::repr(key).c_str();
        made = {.value = 0, .wide = kept_bytes(nb::bytes(text.data(), text.size()), keepers_), .kind = KeyKind::kLarge};
      }
    }
    keys_.push_back(made);
  }

 private:
  Keepers keepers_;               // of the bytes that keys point to
  std::vector<ForeignKey> keys_;  // in order
};

// kvbm._native.ForeignLedger: the Python face of one ForeignLedger, under the GIL.
class PythonForeignLedger {
  template <class Function>
  auto translated(Function&& function) const {
    return bindings::translated(errors_, std::forward<Function>(function));
  }

 public:
  PythonForeignLedger(nb::handle instance, const ForeignLimits& limits, nb::handle tiers, SharedErrors errors,
                      std::shared_ptr<const ForeignClasses> classes)
      : errors_(std::move(errors)),
        classes_(std::move(classes)),
        ledger_(translated([&] { return std::string(utf8(instance, "the instance's name")); }), limits, translated([&] {
                  std::vector<Tier> made;
                  for (nb::handle tier : tiers) {
                    made.push_back(tier_of(tier));
                  }
                  return made;
                }),
                random_word()) {}

  PythonForeignLedger(const PythonForeignLedger&) = delete;
  PythonForeignLedger& operator=(const PythonForeignLedger&) = delete;

  ForeignLedger& ledger() noexcept { return ledger_; }

  void name(nb::handle id, nb::handle root, std::uint8_t group, std::uint32_t block_tokens, bool is_plain) {
    translated([&] {
      if (ledger_.homes() + 1 >= ForeignTable::kMostHomes) {
        throw Error(ErrorCode::kLayout, "an engine's blocks have too many namespaces");
      }
      ledger_.name(sixteen(nb::borrow(id), "a namespace id"), sixteen(nb::borrow(root), "a root"), group, block_tokens,
                   is_plain);
    });
  }

  bool take(nb::handle message, nb::handle rank) {
    return translated([&] {
      const auto bytes = bytes_if(message.ptr());
      return bytes && ledger_.take(*bytes, rank.is_none() ? std::nullopt : std::optional(number<std::uint64_t>(rank)));
    });
  }

  void store(std::size_t home, nb::handle tier, nb::handle keys, nb::handle parent, nb::handle tokens,
             std::size_t width, nb::handle extra_keys) {
    translated([&] {
      if (home >= ledger_.homes() || width == 0) {
        throw Error(ErrorCode::kLayout, "blocks of a namespace without a number, or of no tokens");
      }
      const Keys listed(keys);
      std::optional<Keys> before;
      if (!parent.is_none()) {
        before.emplace(nb::make_tuple(parent));
      }
      ForeignStored stored{.home = static_cast<std::uint8_t>(home),
                           .tier = tier_of(tier),
                           .keys = listed.all(),
                           .parent = before ? before->all().data() : nullptr,
                           .tokens = {},
                           .width = width,
                           .extra_keys = {}};
      if (!ledger_.follows(stored)) {  // then neither tokens nor extra keys count, whatever they are
        ledger_.store(stored);
        return;
      }
      const Tokens hashed(tokens, classes_->token_column);
      const ExtraKeys extra(extra_keys);
      if (!extra.views.empty() && extra.views.size() != stored.keys.size()) {
        throw Error(ErrorCode::kLayout, std::to_string(extra.views.size()) + " extra keys for " +
                                            std::to_string(stored.keys.size()) + " blocks; give one a block, or none");
      }
      stored.tokens = hashed.span();
      stored.extra_keys = extra.views;
      ledger_.store(stored);
    });
  }

  void remove(nb::handle tier, std::uint8_t group, nb::handle keys) {
    translated([&] { ledger_.remove(tier_of(tier), group, Keys(keys).all()); });
  }

  void remove_anywhere(std::uint8_t group, nb::handle keys) {
    translated([&] { ledger_.remove_anywhere(group, Keys(keys).all()); });
  }

  void clear(nb::handle tier) {
    translated([&] { ledger_.clear(tier_of(tier)); });
  }

  nb::tuple counts() const {
    const ForeignCounts& counts = ledger_.counts();
    return nb::make_tuple(counts.unmapped, counts.conflict, counts.beyond, counts.not_held, counts.stored,
                          counts.removed);
  }

  void begin(nb::handle started, std::size_t namespaces) {
    translated([&] {
      Keepers keepers;
      const Event event = event_of(started, *classes_->frames, keepers);
      const auto* const start = std::get_if<InstanceStarted>(&event);
      if (start == nullptr) {
        throw nb::type_error("an epoch begins with an InstanceStarted");
      }
      ledger_.begin(number<std::uint64_t>(started.attr("epoch")), *start, namespaces);
    });
  }

  void stop(nb::handle reason) {
    translated([&] { ledger_.stop(code<StopReason>(reason)); });
  }

  nb::list take_frames(nb::handle instance, std::uint64_t wall_time_ns) {
    return translated([&] {
      nb::list frames;
      FrameHeader header;
      header.instance = utf8(instance, "the instance's name");
      header.epoch = ledger_.epoch();
      header.wall_time_ns = wall_time_ns;
      for (const FrameBody& body : ledger_.waiting_frames()) {
        frames.append(named_tuple(classes_->frame_bytes, nb::int_(ledger_.epoch()), nb::int_(body.first_offset),
                                  nb::int_(body.first_offset + body.event_count), framed(body, header)));
      }
      ledger_.clear_waiting();
      return frames;
    });
  }

  nb::bytes hashes(nb::handle tier) const {
    return translated([&] { return copy_bytes(ledger_.hashes(tier_of(tier))); });
  }

  std::size_t held(nb::handle tier) const {
    return translated([&] { return ledger_.held(tier_of(tier)); });
  }

  bool step_snapshot(std::size_t limit) {
    return translated([&] { return ledger_.step_snapshot(limit); });
  }

 private:
  SharedErrors errors_;                            // Python's
  std::shared_ptr<const ForeignClasses> classes_;  // Python's
  ForeignLedger ledger_;                           // the ledger
};

}  // namespace

void bind_foreign_ledger(nb::module_& module, const SharedErrors& errors) {
  const auto classes = std::make_shared<const ForeignClasses>();
  using Ledger = PythonForeignLedger;
  nb::class_<Ledger>(module, "ForeignLedger", "What one engine without our code holds, and its frames.")
      .def(
          "__init__",
          [errors, classes](Ledger* self, nb::handle instance, std::size_t most_blocks, std::size_t most_gone,
                            bool counts_copies, nb::handle tiers) {
            new (self) Ledger(instance, {most_blocks, most_gone, counts_copies}, tiers, errors, classes);
          },
          nb::arg("instance"), nb::arg("most_blocks"), nb::arg("most_gone"), nb::arg("counts_copies"), nb::arg("tiers"))
      .def_prop_ro("is_empty", [](Ledger& self) { return self.ledger().is_empty(); })
      .def_prop_ro("remembered", [](Ledger& self) { return self.ledger().remembered(); })
      .def_prop_ro("epoch", [](Ledger& self) { return self.ledger().epoch(); })
      .def_prop_ro("applied", [](Ledger& self) { return self.ledger().applied(); })
      .def_prop_ro("digest", [](Ledger& self) { return self.ledger().digest(); })
      .def_prop_ro("stopped", [](Ledger& self) { return self.ledger().is_stopped(); })
      .def_prop_ro("memory_bytes", [](Ledger& self) { return self.ledger().memory_bytes(); })
      .def("name", &Ledger::name, nb::arg("namespace"), nb::arg("root"), nb::arg("group"), nb::arg("block_tokens"),
           nb::arg("is_plain"))
      .def("take", &Ledger::take, nb::arg("message"), nb::arg("rank").none())
      .def("store", &Ledger::store, nb::arg("home"), nb::arg("tier"), nb::arg("keys"), nb::arg("parent").none(),
           nb::arg("tokens"), nb::arg("width"), nb::arg("extra_keys"))
      .def("remove", &Ledger::remove, nb::arg("tier"), nb::arg("group"), nb::arg("keys"))
      .def("remove_anywhere", &Ledger::remove_anywhere, nb::arg("group"), nb::arg("keys"))
      .def("clear", &Ledger::clear, nb::arg("tier"))
      .def(
          "drop", [](Ledger& self, bool forgets) { self.ledger().drop(forgets); }, nb::arg("forgets"))
      .def("counts", &Ledger::counts)
      .def("begin", &Ledger::begin, nb::arg("started"), nb::arg("namespaces"))
      .def("stop", &Ledger::stop, nb::arg("reason"))
      .def("take_frames", &Ledger::take_frames, nb::arg("instance"), nb::arg("wall_time_ns"))
      .def("held", &Ledger::held, nb::arg("tier"))
      .def("hashes", &Ledger::hashes, nb::arg("tier"))
      .def("begin_snapshot", [](Ledger& self) { return self.ledger().begin_snapshot(); })
      .def("step_snapshot", &Ledger::step_snapshot, nb::arg("limit"));
}

}  // namespace kvbm::bindings
