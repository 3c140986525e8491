#include "kvbm/ledger.hpp"

#include <nanobind/stl/string_view.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "native_objects.hpp"
#include "waiting_frames.hpp"

namespace kvbm::bindings {
namespace {

// A NamedTuple class, whose instances are made without running its Python constructor.
class TupleClass {
 public:
  TupleClass(const nb::module_& module, const char* name) : kind_(module.attr(name)), alloc_(allocator_of(kind_)) {}

  template <class... Values>
  nb::object operator()(Values&&... values) const {
    PyObject* const made = alloc_(reinterpret_cast<PyTypeObject*>(kind_.ptr()), sizeof...(values));
    if (made == nullptr) {
      throw nb::python_error();
    }
    Py_ssize_t index = 0;
    (NB_TUPLE_SET_ITEM(made, index++, nb::object(std::forward<Values>(values)).release().ptr()), ...);
    return nb::steal(made);
  }

 private:
  nb::object kind_;  // the class
  allocfunc alloc_;  // makes its instances
};

// The Python classes of the ledger's results. Made once at import, immutable; GIL held.
struct LedgerClasses {
  nb::module_ results = nb::module_::import_("kvbm.core.results");
  nb::module_ codec = nb::module_::import_("kvbm.core.codec");
  nb::module_ events = nb::module_::import_("kvbm.core.events");
  nb::module_ ids = nb::module_::import_("kvbm.core.ids");

  TupleClass match{results, "Match"};
  TupleClass allocation{results, "Allocation"};
  TupleClass copy{results, "Copy"};
  TupleClass tier_counts{results, "TierCounts"};
  TupleClass share_counts{results, "ShareCounts"};
  TupleClass frame_bytes{codec, "FrameBytes"};
  EnumClass tier{ids, "Tier"};
  nb::object started = events.attr("InstanceStarted");
  nb::object encode_started = codec.attr("encode_started");
  nb::object encode_usage = codec.attr("encode_usage");
  nb::object cluster = ids.attr("Reach").attr("CLUSTER");
  nb::object stop_shutdown = events.attr("StopReason").attr("SHUTDOWN");
};

using SharedLedgerClasses = std::shared_ptr<const LedgerClasses>;

// -- Python → C++ -----------------------------------------------------------------------------------------------------

// The bytes of an argument that must be bytes: they cannot change while a command reads them.
Bytes run_of(nb::handle run) {
  const auto bytes = bytes_if(run.ptr());
  if (!bytes) {
    throw nb::type_error("runs of hashes, slots and tiers are packed bytes");
  }
  return *bytes;
}

std::array<std::uint8_t, kHashBytes> sixteen_of(nb::handle value, const char* what) {
  const Bytes bytes = run_of(value);
  if (bytes.size() != kHashBytes) {
    throw Error(ErrorCode::kLayout, std::string(what) + " of " + std::to_string(bytes.size()) + " bytes, not " +
                                        std::to_string(kHashBytes));
  }
  std::array<std::uint8_t, kHashBytes> id;
  std::copy_n(bytes.begin(), kHashBytes, id.begin());
  return id;
}

NamespaceId namespace_of(nb::handle value) { return sixteen_of(value, "a namespace id"); }
std::optional<NamespaceId> namespace_or_none(nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional<NamespaceId>(namespace_of(value));
}

// An enum member, which is an int, of an enum that counts from 0.
template <class Enum>
Enum member_of(nb::handle value, std::uint8_t count, const char* what) {
  const long number = PyLong_AsLong(value.ptr());
  if (number < 0 || number >= count) {
    PyErr_Clear();
    throw nb::value_error((std::string(nb::repr(value).c_str()) + " is no " + what).c_str());
  }
  return static_cast<Enum>(number);
}

Tier tier_of(nb::handle value) { return member_of<Tier>(value, kTierCount, "Tier"); }

EvictReason reason_of(nb::handle value) { return member_of<EvictReason>(value, kEvictReasonCount, "EvictReason"); }

CopySource source_of(nb::handle source) {
  if (PyUnicode_Check(source.ptr())) {
    return std::string(utf8(source, "a source instance's name"));
  }
  return tier_of(source);
}

std::vector<Pool> pools_of(const nb::tuple& pools, const LedgerClasses& classes) {
  std::vector<Pool> listed;
  for (nb::handle pool : pools) {
    listed.push_back({.tier = tier_of(pool.attr("tier")),
                      .slots = number<std::uint32_t>(pool.attr("slots")),
                      .is_cluster = pool.attr("reach").equal(classes.cluster)});
  }
  return listed;
}

std::vector<Share> shares_of(nb::handle shares) {
  std::vector<Share> listed;
  for (nb::handle share : shares) {
    Share one{.tenant = std::string(utf8(share.attr("tenant"), "a tenant's name")),
              .weight = number<std::uint32_t>(share.attr("weight"))};
    one.quota.fill(kNoQuota);
    for (nb::handle item : share.attr("quota_slots").attr("items")()) {
      one.quota[static_cast<std::size_t>(tier_of(item[0]))] = number<std::uint32_t>(item[1]);
    }
    listed.push_back(std::move(one));
  }
  return listed;
}

std::vector<Recovered> recovered_of(nb::handle entries) {
  std::vector<Recovered> recovered;
  for (nb::handle entry : entries) {
    recovered.push_back({.hash = sixteen_of(entry.attr("hash"), "a recovered hash"),
                         .namespace_id = namespace_of(entry.attr("namespace")),
                         .slot = number<std::uint32_t>(entry.attr("slot"))});
  }
  return recovered;
}

// -- C++ → Python -----------------------------------------------------------------------------------------------------

nb::bytes packed(std::span<const std::uint32_t> slots) { return nb::bytes(slots.data(), slots.size_bytes()); }

// kvbm._native.Ledger: the Python face of one Ledger; the caller's lock and the GIL protect it.
class PythonLedger {
  template <class Function>
  auto translated(Function&& function) const {
    return bindings::translated(errors_, std::forward<Function>(function));
  }

 public:
  PythonLedger(nb::handle pools, std::string_view eviction, std::size_t event_bytes, nb::handle shares,
               SharedErrors errors, SharedLedgerClasses classes)
      : errors_(std::move(errors)),
        classes_(std::move(classes)),
        pools_(nb::borrow(pools)),
        ledger_(bindings::translated(
            errors_, [&] { return Ledger(pools_of(pools_, *classes_), eviction, event_bytes, shares_of(shares)); })) {}

  Ledger& ledger() noexcept { return ledger_; }
  const nb::tuple& pools() const { return pools_; }
  std::uint64_t epoch() const { return ledger_.epoch(); }
  std::uint64_t applied() const { return ledger_.applied(); }
  std::uint64_t digest() const { return ledger_.digest(); }
  bool stopped() const { return ledger_.is_stopped(); }
  bool overflowed() const { return ledger_.has_overflowed(); }

  void start(std::uint64_t epoch, nb::handle namespaces, nb::handle topology, nb::handle engine, nb::handle version,
             nb::handle recovered, nb::handle attributes) {
    translated([&] {
      const StartedWith with{nb::tuple(nb::borrow(namespaces)), nb::tuple(nb::borrow(topology)), nb::borrow(engine),
                             nb::borrow(version), nb::handle(reinterpret_cast<PyObject*>(&PyDict_Type))(attributes)};
      const nb::object blob = started_blob(epoch, with);
      std::array<std::vector<Recovered>, kTierCount> by_tier;
      if (!recovered.is_none()) {
        for (nb::handle item : recovered.attr("items")()) {
          by_tier[static_cast<std::size_t>(tier_of(item[0]))] = recovered_of(item[1]);
        }
      }
      if (ledger_.epoch() == 0) {
        started_with_ = with;
      }
      ledger_.start(epoch, run_of(blob), with.namespaces.size(), by_tier);
    });
  }

  std::uint64_t restart(std::uint64_t epoch) {
    return translated([&] {
      const nb::object blob = started_blob(epoch, started_with_);
      return ledger_.restart(epoch, run_of(blob), started_with_.namespaces.size());
    });
  }

  void stop(nb::handle reason) {
    translated([&] { ledger_.stop(member_of<StopReason>(reason, kStopReasonCount, "StopReason")); });
  }

  void record_usage(nb::handle usage) {
    translated([&] {
      const nb::object report = classes_->encode_usage(usage);
      ledger_.record_usage(run_of(report));
    });
  }

  nb::list take_frames(nb::handle instance, std::uint64_t wall_time_ns) {
    return translated([&] {
      nb::list frames;
      FrameHeader header;
      header.instance = utf8(instance, "the instance's name");
      header.epoch = ledger_.epoch();
      header.wall_time_ns = wall_time_ns;
      for (const FrameBody& body : ledger_.waiting_frames()) {
        frames.append(classes_->frame_bytes(nb::int_(ledger_.epoch()), nb::int_(body.first_offset),
                                            nb::int_(body.first_offset + body.event_count), framed(body, header)));
      }
      ledger_.clear_waiting();
      return frames;
    });
  }

  nb::object match(nb::handle hashes, bool pinned, nb::handle hottest, nb::handle namespace_id) {
    return translated([&] {
      const std::optional<NamespaceId> whose = namespace_or_none(namespace_id);
      const Match found = ledger_.match(run_of(hashes), pinned, tier_of(hottest), whose ? &*whose : nullptr);
      return classes_->match(nb::int_(found.depth), copy_bytes(found.tiers), copy_bytes(found.slots));
    });
  }

  nb::object lend(nb::handle namespace_id, nb::handle hashes, nb::handle coldest) {
    return translated([&] {
      const Match found = ledger_.lend(namespace_of(namespace_id), run_of(hashes), tier_of(coldest));
      return classes_->match(nb::int_(found.depth), copy_bytes(found.tiers), copy_bytes(found.slots));
    });
  }

  nb::bytes holders(nb::handle hashes, nb::handle hottest, nb::handle namespace_id) {
    return translated([&] {
      const std::optional<NamespaceId> whose = namespace_or_none(namespace_id);
      return copy_bytes(ledger_.holders(run_of(hashes), tier_of(hottest), whose ? &*whose : nullptr));
    });
  }

  bool holds(nb::handle tier, nb::handle block, nb::handle namespace_id) const {
    const std::optional<NamespaceId> whose = namespace_or_none(namespace_id);
    return ledger_.holds(tier_of(tier), run_of(block), whose ? &*whose : nullptr);
  }

  nb::bytes lacking(nb::handle tier, nb::handle hashes) {
    return translated([&] { return copy_bytes(ledger_.lacking(tier_of(tier), run_of(hashes))); });
  }

  nb::bytes held(nb::handle tier) const { return copy_bytes(ledger_.held(tier_of(tier))); }

  nb::tuple held_of(nb::handle tier, nb::handle namespace_id) const {
    return translated([&] {
      const std::optional<NamespaceId> wanted = namespace_or_none(namespace_id);
      const HeldBlocks found = ledger_.held_of(tier_of(tier), wanted ? &*wanted : nullptr);
      return nb::make_tuple(copy_bytes(found.hashes), packed(found.slots));
    });
  }

  void pin(nb::handle tier, nb::handle slots) {
    translated([&] { ledger_.pin(tier_of(tier), run_of(slots)); });
  }

  void unpin(nb::handle tier, nb::handle slots, bool read) {
    translated([&] { ledger_.unpin(tier_of(tier), run_of(slots), read); });
  }

  nb::object allocate(nb::handle tier, std::size_t count, nb::handle namespace_id) {
    return translated([&]() -> nb::object {
      const NamespaceId owner = namespace_id.is_none() ? NamespaceId{} : namespace_of(namespace_id);
      const auto allocation = ledger_.allocate(tier_of(tier), count, namespace_id.is_none() ? nullptr : &owner);
      if (!allocation) {
        return nb::none();
      }
      return classes_->allocation(copy_bytes(allocation->slots), nb::int_(allocation->after));
    });
  }

  void release(nb::handle tier, nb::handle slots) {
    translated([&] { ledger_.release(tier_of(tier), run_of(slots)); });
  }

  nb::bytes create(nb::handle namespace_id, nb::handle tier, nb::handle parent, nb::handle start, nb::handle hashes,
                   nb::handle slots) {
    return translated([&] {
      return copy_bytes(ledger_.create(namespace_of(namespace_id), tier_of(tier), sixteen_of(parent, "a parent hash"),
                                       number<std::uint64_t>(start), run_of(hashes), run_of(slots)));
    });
  }

  std::size_t evict(nb::handle tier, nb::handle hashes, nb::handle reason) {
    return translated([&] { return ledger_.evict(tier_of(tier), run_of(hashes), reason_of(reason)); });
  }

  void forget(nb::handle tier, nb::handle namespace_id, nb::handle hashes, nb::handle reason) {
    translated([&] { ledger_.forget(tier_of(tier), namespace_of(namespace_id), run_of(hashes), reason_of(reason)); });
  }

  void claim(nb::handle tier, nb::handle namespace_id, nb::handle hashes, nb::handle finder) {
    translated([&] {
      ledger_.claim(tier_of(tier), namespace_of(namespace_id), run_of(hashes), utf8(finder, "the finder's name"));
    });
  }

  std::size_t adopt(nb::handle namespace_id, nb::handle tier, nb::handle hashes, nb::handle slots, nb::handle finder) {
    return translated([&] {
      return ledger_.adopt(namespace_of(namespace_id), tier_of(tier), run_of(hashes), run_of(slots),
                           utf8(finder, "the finder's name"));
    });
  }

  std::size_t keep(nb::handle tier, nb::handle hashes, double until_s, std::int64_t priority, nb::handle namespace_id,
                   bool until_read, std::optional<std::size_t> most) {
    return translated([&] {
      const std::optional<NamespaceId> whose = namespace_or_none(namespace_id);
      const NamespaceId* const known = whose ? &*whose : nullptr;
      return ledger_.keep(tier_of(tier), run_of(hashes), until_s, priority, known, until_read, most);
    });
  }

  std::size_t expire(double now_s) { return ledger_.expire(now_s); }

  nb::object begin_copy(nb::handle namespace_id, nb::handle source, nb::handle target, nb::handle hashes) {
    return translated([&]() -> nb::object {
      const auto begun =
          ledger_.begin_copy(namespace_of(namespace_id), source_of(source), tier_of(target), run_of(hashes));
      if (!begun) {
        return nb::none();
      }
      const Copy& copy = *begun->second;
      const auto* const tier = std::get_if<Tier>(&copy.source);
      return classes_->copy(nb::int_(begun->first), nb::borrow(namespace_id),
                            tier != nullptr ? classes_->tier(*tier) : nb::borrow(source), classes_->tier(copy.target),
                            copy_bytes(copy.hashes), packed(copy.source_slots), packed(copy.target_slots),
                            nb::int_(copy.after), nb::int_(copy.epoch));
    });
  }

  nb::list end_copy(nb::handle copy, nb::handle arrived, nb::handle cause, bool kept, bool pinned) {
    return translated([&] {
      const auto id = nb::cast<std::uint64_t>(copy.attr("id"));
      std::vector<std::uint8_t> flags;
      for (nb::handle flag : arrived) {
        flags.push_back(is_true(flag) ? 1 : 0);
      }
      if (const std::size_t count = ledger_.copy_blocks(id); flags.size() != count) {
        throw nb::value_error(
            (std::to_string(flags.size()) + " arrivals for a copy of " + std::to_string(count) + " blocks").c_str());
      }
      const auto why = member_of<MigrateCause>(cause, kMigrateCauseCount, "MigrateCause");
      nb::list holders;
      for (const std::uint32_t slot : ledger_.end_copy(id, flags, why, kept, pinned)) {
        holders.append(slot != kNoSlot ? nb::object(nb::int_(slot)) : nb::none());
      }
      return holders;
    });
  }

  std::size_t copies_in_flight() const { return ledger_.copies_in_flight(); }

  bool begin_snapshot() {
    return translated([&] { return ledger_.begin_snapshot(); });
  }

  bool step_snapshot(std::size_t limit) {
    return translated([&] { return ledger_.step_snapshot(limit); });
  }

  nb::object counts(nb::handle tier) const {
    return translated([&] {
      const TierCounts counts = ledger_.counts(tier_of(tier));
      return classes_->tier_counts(nb::int_(counts.slots), nb::int_(counts.free), nb::int_(counts.held),
                                   nb::int_(counts.evictable), nb::int_(counts.allocated));
    });
  }

  std::size_t kept(nb::handle tier) const {
    return translated([&] { return ledger_.kept(tier_of(tier)); });
  }

  void assign(nb::handle namespace_id, nb::handle tenant) {
    translated([&] { ledger_.assign(namespace_of(namespace_id), utf8(tenant, "a tenant's name")); });
  }

  nb::list share_counts(nb::handle tier) const {
    return translated([&] {
      const Tier wanted = tier_of(tier);
      nb::list counted;
      std::uint32_t at = 0;
      for (const Share& share : ledger_.shares()) {
        const ShareCounts counts = ledger_.share_counts(wanted, at++);
        const std::uint32_t quota = share.quota[static_cast<std::size_t>(wanted)];
        counted.append(classes_->share_counts(
            nb::str(share.tenant.data(), share.tenant.size()), nb::int_(share.weight), nb::int_(counts.held),
            nb::int_(counts.evictable), quota == kNoQuota ? nb::object(nb::none()) : nb::object(nb::int_(quota))));
      }
      return counted;
    });
  }

 private:
  // What `start` was given for the InstanceStarted of its epoch, and of each later one.
  struct StartedWith {
    nb::tuple namespaces;                // known at the start
    nb::tuple topology;                  // where the instance stands
    nb::object engine = nb::str("");     // who embeds it
    nb::object version = nb::str("");    // kvbm's
    nb::object attributes = nb::dict();  // what else is said of the instance; a copy
  };

  nb::object started_blob(std::uint64_t epoch, const StartedWith& with) const {
    return classes_->encode_started(
        classes_->started(nb::arg("epoch") = epoch, nb::arg("pools") = pools_, nb::arg("namespaces") = with.namespaces,
                          nb::arg("topology") = with.topology, nb::arg("engine") = with.engine,
                          nb::arg("version") = with.version, nb::arg("attributes") = with.attributes));
  }

  SharedErrors errors_;          // what a thrown Error becomes
  SharedLedgerClasses classes_;  // what results are made of
  nb::tuple pools_;              // as they were given
  StartedWith started_with_;     // set by `start`
  Ledger ledger_;                // the ledger
};

}  // namespace

Ledger& ledger_of(nb::handle object) {
  if (!nb::isinstance<PythonLedger>(object)) {
    throw nb::type_error("the ledger is no kvbm._native.Ledger");
  }
  return nb::cast<PythonLedger&>(object).ledger();
}

void bind_ledger(nb::module_& module, const SharedErrors& errors) {
  const auto classes = std::make_shared<const LedgerClasses>();
  const nb::tuple none;
  const nb::object hbm = classes->tier(Tier::kHbm);
  const nb::object nvme = classes->tier(Tier::kNvme);
  nb::class_<PythonLedger>(module, "Ledger",
                           "The ledger of one instance, as kvbm.reference.ledger.Ledger specifies it.")
      .def(
          "__init__",
          [errors, classes](PythonLedger* self, nb::handle pools, std::string_view eviction, std::size_t event_bytes,
                            nb::handle shares) {
            new (self) PythonLedger(pools, eviction, event_bytes, shares, errors, classes);
          },
          nb::arg("pools"), nb::arg("eviction") = "lru", nb::arg("event_bytes") = kDefaultEventBytes,
          nb::arg("shares") = none)
      .def_prop_ro("pools", &PythonLedger::pools)
      .def_prop_ro("epoch", &PythonLedger::epoch)
      .def_prop_ro("applied", &PythonLedger::applied)
      .def_prop_ro("digest", &PythonLedger::digest)
      .def_prop_ro("stopped", &PythonLedger::stopped)
      .def_prop_ro("overflowed", &PythonLedger::overflowed)
      .def("start", &PythonLedger::start, nb::arg("epoch"), nb::arg("namespaces") = none, nb::arg("topology") = none,
           nb::arg("engine") = "", nb::arg("version") = "", nb::arg("recovered") = nb::none(),
           nb::arg("attributes") = nb::dict())
      .def("restart", &PythonLedger::restart, nb::arg("epoch"))
      .def("stop", &PythonLedger::stop, nb::arg("reason") = classes->stop_shutdown)
      .def("record_usage", &PythonLedger::record_usage, nb::arg("usage"))
      .def("take_frames", &PythonLedger::take_frames, nb::arg("instance"), nb::arg("wall_time_ns"))
      .def("match", &PythonLedger::match, nb::arg("hashes"), nb::arg("pinned") = false, nb::arg("hottest") = hbm,
           nb::arg("namespace") = nb::none())
      .def("lend", &PythonLedger::lend, nb::arg("namespace"), nb::arg("hashes"), nb::arg("coldest") = nvme)
      .def("holders", &PythonLedger::holders, nb::arg("hashes"), nb::arg("hottest") = hbm,
           nb::arg("namespace") = nb::none())
      .def("holds", &PythonLedger::holds, nb::arg("tier"), nb::arg("block"), nb::arg("namespace") = nb::none())
      .def("lacking", &PythonLedger::lacking, nb::arg("tier"), nb::arg("hashes"))
      .def("held", &PythonLedger::held, nb::arg("tier"))
      .def("held_of", &PythonLedger::held_of, nb::arg("tier"), nb::arg("namespace") = nb::none())
      .def("pin", &PythonLedger::pin, nb::arg("tier"), nb::arg("slots"))
      .def("unpin", &PythonLedger::unpin, nb::arg("tier"), nb::arg("slots"), nb::arg("read") = false)
      .def("allocate", &PythonLedger::allocate, nb::arg("tier"), nb::arg("count"), nb::arg("namespace") = nb::none())
      .def("release", &PythonLedger::release, nb::arg("tier"), nb::arg("slots"))
      .def("create", &PythonLedger::create, nb::arg("namespace"), nb::arg("tier"), nb::arg("parent"), nb::arg("start"),
           nb::arg("hashes"), nb::arg("slots"))
      .def("evict", &PythonLedger::evict, nb::arg("tier"), nb::arg("hashes"), nb::arg("reason"))
      .def("forget", &PythonLedger::forget, nb::arg("tier"), nb::arg("namespace"), nb::arg("hashes"), nb::arg("reason"))
      .def("claim", &PythonLedger::claim, nb::arg("tier"), nb::arg("namespace"), nb::arg("hashes"), nb::arg("finder"))
      .def("adopt", &PythonLedger::adopt, nb::arg("namespace"), nb::arg("tier"), nb::arg("hashes"), nb::arg("slots"),
           nb::arg("finder"))
      .def("keep", &PythonLedger::keep, nb::arg("tier"), nb::arg("hashes"), nb::arg("until_s"), nb::arg("priority") = 0,
           nb::arg("namespace") = nb::none(), nb::arg("until_read") = false, nb::arg("most") = nb::none())
      .def("expire", &PythonLedger::expire, nb::arg("now_s"))
      .def("begin_copy", &PythonLedger::begin_copy, nb::arg("namespace"), nb::arg("source"), nb::arg("target"),
           nb::arg("hashes"))
      .def("end_copy", &PythonLedger::end_copy, nb::arg("copy"), nb::arg("arrived"), nb::arg("cause"),
           nb::arg("kept") = true, nb::arg("pinned") = false)
      .def("copies_in_flight", &PythonLedger::copies_in_flight)
      .def("begin_snapshot", &PythonLedger::begin_snapshot)
      .def("step_snapshot", &PythonLedger::step_snapshot, nb::arg("limit") = kMaxRunBlocks)
      .def("counts", &PythonLedger::counts, nb::arg("tier"))
      .def("kept", &PythonLedger::kept, nb::arg("tier"))
      .def("assign", &PythonLedger::assign, nb::arg("namespace"), nb::arg("tenant"))
      .def("share_counts", &PythonLedger::share_counts, nb::arg("tier"));
}

}  // namespace kvbm::bindings
