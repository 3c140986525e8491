#include "kvbm/foreign_ledger.hpp"

#include <algorithm>
#include <mutex>
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

// Holds a lock for its life. Whoever waits for it waits without the GIL, for the one inside may want that back.
class Exclusive {
 public:
  explicit Exclusive(std::mutex& lock) : lock_(lock) {
    if (!lock_.try_lock()) {
      const GilReleased released;
      lock_.lock();
    }
  }
  ~Exclusive() { lock_.unlock(); }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  std::mutex& lock_;  // what is held
};

constexpr std::size_t kBlockBytes = 64;  // of an engine's event, about

// kvbm._native.ForeignLedger: the Python face of one ForeignLedger. Any thread: a call has the ledger for itself, and
// one that may be long works without the GIL. Nothing of Python's runs while a call has the ledger, so no thread meets
// itself there.
class PythonForeignLedger {
  template <class Function>
  auto translated(Function&& function) const {
    return bindings::translated(errors_, std::forward<Function>(function));
  }

 public:
  // What a function gives that has the ledger for itself.
  template <class Function>
  auto locked(Function&& function) {
    return translated([&] {
      const Exclusive mine(lock_);
      return function(ledger_);
    });
  }

  // The same of one that uses nothing of Python's, without the GIL where it works on many bytes.
  template <class Function>
  auto worked(std::size_t bytes, Function&& function) {
    return locked([&](ForeignLedger& ledger) {
      std::optional<GilReleased> released;
      if (bytes > kReleaseGilBytes) {
        released.emplace();
      }
      return function(ledger);
    });
  }

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

  void name(nb::handle id, nb::handle root, std::uint8_t group, std::uint32_t block_tokens, bool is_plain) {
    translated([&] {
      const NamespaceId named = sixteen(nb::borrow(id), "a namespace id");
      const SequenceHash start = sixteen(nb::borrow(root), "a root");
      const Exclusive mine(lock_);
      if (ledger_.homes() + 1 >= ForeignTable::kMostHomes) {
        throw Error(ErrorCode::kLayout, "an engine's blocks have too many namespaces");
      }
      ledger_.name(named, start, group, block_tokens, is_plain);
    });
  }

  bool take(nb::handle message, nb::handle rank) {
    return translated([&] {
      const auto bytes = bytes_if(message.ptr());
      const auto counted = rank.is_none() ? std::nullopt : std::optional(number<std::uint64_t>(rank));
      return bytes && worked(bytes->size(), [&](ForeignLedger& ledger) { return ledger.take(*bytes, counted); });
    });
  }

  void store(std::size_t home, nb::handle tier, nb::handle keys, nb::handle parent, nb::handle tokens,
             std::size_t width, nb::handle extra_keys) {
    translated([&] {
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
      const bool follows = locked([&](const ForeignLedger& ledger) {
        if (home >= ledger.homes() || width == 0) {
          throw Error(ErrorCode::kLayout, "blocks of a namespace without a number, or of no tokens");
        }
        return ledger.follows(stored);
      });
      if (!follows) {  // then neither tokens nor extra keys count, whatever they are
        worked(stored.keys.size() * kBlockBytes, [&](ForeignLedger& ledger) { ledger.store(stored); });
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
      worked(stored.tokens.size_bytes(), [&](ForeignLedger& ledger) { ledger.store(stored); });
    });
  }

  void remove(nb::handle tier, std::uint8_t group, nb::handle keys) {
    translated([&] {
      const Tier from = tier_of(tier);
      const Keys listed(keys);
      worked(listed.all().size() * kBlockBytes,
             [&](ForeignLedger& ledger) { ledger.remove(from, group, listed.all()); });
    });
  }

  void remove_anywhere(std::uint8_t group, nb::handle keys) {
    translated([&] {
      const Keys listed(keys);
      worked(listed.all().size() * kBlockBytes,
             [&](ForeignLedger& ledger) { ledger.remove_anywhere(group, listed.all()); });
    });
  }

  void clear(nb::handle tier) {
    translated([&] {
      const Tier emptied = tier_of(tier);
      worked(remembered() * kBlockBytes, [&](ForeignLedger& ledger) { ledger.clear(emptied); });
    });
  }

  void drop(bool forgets) {
    worked(remembered() * kBlockBytes, [&](ForeignLedger& ledger) { ledger.drop(forgets); });
  }

  std::size_t remembered() {
    return locked([](const ForeignLedger& ledger) { return ledger.remembered(); });
  }

  nb::tuple counts() {
    const ForeignCounts counts = locked([](const ForeignLedger& ledger) { return ledger.counts(); });
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
      const auto epoch = number<std::uint64_t>(started.attr("epoch"));
      locked([&](ForeignLedger& ledger) { ledger.begin(epoch, *start, namespaces); });
    });
  }

  void stop(nb::handle reason) {
    translated([&] {
      const auto why = code<StopReason>(reason);
      locked([&](ForeignLedger& ledger) { ledger.stop(why); });
    });
  }

  nb::list take_frames(nb::handle instance, std::uint64_t wall_time_ns) {
    return locked([&](ForeignLedger& ledger) {
      nb::list frames;
      FrameHeader header;
      header.instance = utf8(instance, "the instance's name");
      header.epoch = ledger.epoch();
      header.wall_time_ns = wall_time_ns;
      for (const FrameBody& body : ledger.waiting_frames()) {
        frames.append(named_tuple(classes_->frame_bytes, nb::int_(ledger.epoch()), nb::int_(body.first_offset),
                                  nb::int_(body.first_offset + body.event_count), framed(body, header)));
      }
      ledger.clear_waiting();
      return frames;
    });
  }

  nb::bytes hashes(nb::handle tier) {
    return translated([&] {
      const Tier listed = tier_of(tier);
      return copy_bytes(
          worked(remembered() * kBlockBytes, [&](const ForeignLedger& ledger) { return ledger.hashes(listed); }));
    });
  }

  std::size_t held(nb::handle tier) {
    return translated([&] {
      const Tier listed = tier_of(tier);
      return locked([&](const ForeignLedger& ledger) { return ledger.held(listed); });
    });
  }

  bool step_snapshot(std::size_t limit) {
    return worked(std::min(limit, remembered()) * kBlockBytes,
                  [&](ForeignLedger& ledger) { return ledger.step_snapshot(limit); });
  }

 private:
  SharedErrors errors_;                            // Python's
  std::shared_ptr<const ForeignClasses> classes_;  // Python's
  std::mutex lock_;                                // held by the call that has the ledger
  ForeignLedger ledger_;                           // the ledger
};

// A property that a getter of the ledger gives.
template <class Value>
auto read(Value (ForeignLedger::*getter)() const noexcept) {
  return [getter](PythonForeignLedger& self) {
    return self.locked([getter](const ForeignLedger& ledger) { return (ledger.*getter)(); });
  };
}

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
      .def_prop_ro("is_empty", read(&ForeignLedger::is_empty))
      .def_prop_ro("remembered", &Ledger::remembered)
      .def_prop_ro("epoch", read(&ForeignLedger::epoch))
      .def_prop_ro("applied", read(&ForeignLedger::applied))
      .def_prop_ro("digest", read(&ForeignLedger::digest))
      .def_prop_ro("stopped", read(&ForeignLedger::is_stopped))
      .def_prop_ro("memory_bytes", read(&ForeignLedger::memory_bytes))
      .def("name", &Ledger::name, nb::arg("namespace"), nb::arg("root"), nb::arg("group"), nb::arg("block_tokens"),
           nb::arg("is_plain"))
      .def("take", &Ledger::take, nb::arg("message"), nb::arg("rank").none())
      .def("store", &Ledger::store, nb::arg("home"), nb::arg("tier"), nb::arg("keys"), nb::arg("parent").none(),
           nb::arg("tokens"), nb::arg("width"), nb::arg("extra_keys"))
      .def("remove", &Ledger::remove, nb::arg("tier"), nb::arg("group"), nb::arg("keys"))
      .def("remove_anywhere", &Ledger::remove_anywhere, nb::arg("group"), nb::arg("keys"))
      .def("clear", &Ledger::clear, nb::arg("tier"))
      .def("drop", &Ledger::drop, nb::arg("forgets"))
      .def("counts", &Ledger::counts)
      .def("begin", &Ledger::begin, nb::arg("started"), nb::arg("namespaces"))
      .def("stop", &Ledger::stop, nb::arg("reason"))
      .def("take_frames", &Ledger::take_frames, nb::arg("instance"), nb::arg("wall_time_ns"))
      .def("held", &Ledger::held, nb::arg("tier"))
      .def("hashes", &Ledger::hashes, nb::arg("tier"))
      .def("begin_snapshot",
           [](Ledger& self) { return self.locked([](ForeignLedger& ledger) { return ledger.begin_snapshot(); }); })
      .def("step_snapshot", &Ledger::step_snapshot, nb::arg("limit"));
}

}  // namespace kvbm::bindings
