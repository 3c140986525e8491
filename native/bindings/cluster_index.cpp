#include "kvbm/cluster_index.hpp"

#include <fcntl.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "answer_classes.hpp"
#include "frames.hpp"
#include "kvbm/checkpoint.hpp"
#include "kvbm/json_text.hpp"
#include "kvbm/words.hpp"
#include "plain_frames.hpp"
#include "python.hpp"
#include "router.hpp"

namespace kvbm::bindings {
namespace {

// Frames of more bytes than this are applied without the GIL: what is shorter takes less time than handing it over.
constexpr std::size_t kApplyWithoutGilBytes = 16 * 1024;

// Frames of up to this many events are read once and their events kept; a larger frame is read twice.
constexpr std::uint32_t kKeptEvents = 4096;

const char* const kAnomalyNames[kAnomalyCount] = {"created-twice",       "evicted-unheld",    "snapshot-added",
                                                  "snapshot-incomplete", "snapshot-withdrew", "unnamed-claim",
                                                  "refused-at-capacity"};

// Of a pool as it was declared; 0 where that is no size.
std::uint64_t block_bytes_of(nb::handle pool) {
  const nb::object size = pool.attr("block_bytes");
  const unsigned long long bytes = PyLong_AsUnsignedLongLong(size.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return 0;
  }
  return bytes;
}

PyObject* number_of(std::uint64_t value) { return PyLong_FromUnsignedLongLong(value); }
PyObject* flag_of(bool value) { return Py_NewRef(value ? Py_True : Py_False); }

// Classes of kvbm.catalog.index.cluster_index and the core, found when the first index is made: the catalog is not
// imported by an engine.
struct IndexClasses {
  IndexClasses()
      : module(nb::module_::import_("kvbm.catalog.index.cluster_index")),
        depth(module, "InstanceDepth"),
        pool_depth(module, "PoolDepth"),
        prefixes(module, "Prefixes"),
        lendable(module, "LendableRun"),
        holder(module, "Holder"),
        presence(module, "Presence"),
        presences(module, "Presences"),
        view(module, "InstanceView"),
        audit(module, "Audit"),
        applied(module, "Applied"),
        claims(module, "Claims"),
        answers(nb::module_::import_("kvbm.core.answers")),
        lookup(answers, "LookupAnswer",
               {"namespace", "blocks", "deepest", "instances", "pools", "excluded", "view_age_s", "more",
                "more_excluded"}),
        holding(answers, "InstanceHolding", {"instance", "depth", "tiers", "reach", "suspect"}),
        pool_holding(answers, "PoolHolding", {"pool", "depth"}),
        frames(frame_classes()),
        stop_reason(nb::module_::import_("kvbm.core.events").attr("StopReason")),
        pool_stated(nb::module_::import_("kvbm.core.events").attr("PoolStated")),
        encode(nb::module_::import_("msgspec.msgpack").attr("encode")),
        decode(nb::module_::import_("msgspec.msgpack").attr("decode")) {
    for (const nb::handle tier : nb::module_::import_("kvbm.core.ids").attr("Tier")) {
      tier_names.push_back(tier.attr("name"));
    }
  }

  nb::module_ module;                  // kvbm.catalog.index.cluster_index
  TupleClass depth;                    // InstanceDepth
  TupleClass pool_depth;               // PoolDepth
  TupleClass prefixes;                 // Prefixes
  TupleClass lendable;                 // LendableRun
  TupleClass holder;                   // Holder
  TupleClass presence;                 // Presence
  TupleClass presences;                // Presences
  TupleClass view;                     // InstanceView
  TupleClass audit;                    // Audit
  TupleClass applied;                  // Applied
  TupleClass claims;                   // Claims
  nb::module_ answers;                 // kvbm.core.answers
  StructClass<9> lookup;               // LookupAnswer
  StructClass<5> holding;              // InstanceHolding
  StructClass<2> pool_holding;         // PoolHolding
  SharedClasses frames;                // of events
  nb::object stop_reason;              // StopReason
  nb::object pool_stated;              // PoolStated
  nb::object encode;                   // of msgspec.msgpack: declarations of pools are kept as it writes them
  nb::object decode;                   // the same
  std::vector<nb::object> tier_names;  // by number
};

Bytes packed(const nb::bytes& data, const char* what) {
  if (data.size() % kHashBytes != 0) {
    throw Error(ErrorCode::kLayout,
                words("a run of ", what, " has ", data.size(), " bytes, which is no multiple of ", kHashBytes));
  }
  return {static_cast<const std::uint8_t*>(data.data()), data.size()};
}

constexpr std::uint8_t kSuspect = 1;  // flags of a row
constexpr std::uint8_t kPool = 2;

template <class Number>
void put(std::string& told, Number number) {
  static_assert(std::endian::native == std::endian::little);
  told.append(reinterpret_cast<const char*>(&number), sizeof number);
}

void put_name(std::string& told, std::uint8_t flags, std::string_view name) {
  name = name.substr(0, 0xFF);
  put<std::uint8_t>(told, flags);
  put<std::uint8_t>(told, static_cast<std::uint8_t>(name.size()));
  told.append(name);
}

std::string_view text_of(const nb::handle& name) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (text == nullptr) {
    throw nb::python_error();
  }
  return {text, static_cast<std::size_t>(size)};
}

NamespaceId namespace_id(const nb::bytes& data) {
  if (data.size() != kHashBytes) {
    throw Error(ErrorCode::kLayout,
                "a namespace id of " + std::to_string(data.size()) + " bytes, not " + std::to_string(kHashBytes));
  }
  NamespaceId id;
  std::memcpy(id.data(), data.data(), kHashBytes);
  return id;
}

// A file mapped to be read, for this object's life.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat found{};
    if (file < 0 || ::fstat(file, &found) != 0) {
      const std::string why = std::strerror(errno);
      if (file >= 0) {
        ::close(file);
      }
      throw Error(ErrorCode::kCheckpoint, path + " cannot be read (" + why + ")");
    }
    size_ = static_cast<std::size_t>(found.st_size);
    void* const mapped = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0) : nullptr;
    const std::string why = std::strerror(errno);
    ::close(file);
    if (mapped == MAP_FAILED) {
      throw Error(ErrorCode::kCheckpoint, path + " cannot be mapped (" + why + ")");
    }
    data_ = mapped;
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    if (data_ != nullptr) {
      ::munmap(data_, size_);
    }
  }

  Bytes bytes() const noexcept { return {static_cast<const std::uint8_t*>(data_), size_}; }

 private:
  void* data_ = nullptr;  // the mapping
  std::size_t size_ = 0;  // its bytes
};

// A ClusterIndex, and what of it is Python's: names as strings, pools as they were declared.
class PythonIndex {
 public:
  explicit PythonIndex(std::uint64_t capacity) : index_(capacity) {}

  nb::object apply(const nb::bytes& data, std::size_t at, std::uint32_t skip) {
    const Bytes bytes(static_cast<const std::uint8_t*>(data.data()), data.size());
    FrameReader reader(bytes, at);
    const FrameHeader& header = reader.header();
    std::vector<std::vector<DeclaredPool>> starts;
    nb::object started = nb::none();
    // Everything is read before anything is applied. Of a frame of usual size the events are kept, so it is read once.
    const bool is_kept = header.event_count <= kKeptEvents;
    nb::list usages;
    std::uint32_t position = 0;
    std::vector<Event> events;
    events.reserve(is_kept ? header.event_count : 0);
    while (const std::optional<Event> event = reader.next()) {
      const bool is_wanted = position++ >= skip;
      if (const auto* const start = std::get_if<InstanceStarted>(&*event)) {
        nb::object decoded = decode_started(*classes_.frames, start->blob, at);
        if (is_wanted || !is_kept) {
          starts.push_back(declared(decoded.attr("pools")));
        }
        if (is_wanted) {
          started = std::move(decoded);
        }
      }
      if (const auto* const usage = std::get_if<UsageRecorded>(&*event); usage != nullptr && is_wanted) {
        usages.append(nb::make_tuple(position - 1, decode_usage(*classes_.frames, usage->report, at)));
      }
      if (is_wanted && is_kept) {
        events.push_back(*event);
      }
    }
    const std::uint32_t instance = number_for(header.instance);
    if (!started.is_none()) {
      pools_[instance] = started.attr("pools");
    }
    AppliedFrame applied;
    {
      std::optional<GilReleased> released;
      if (header.frame_bytes > kApplyWithoutGilBytes) {
        released.emplace();
      }
      applied = is_kept ? index_.apply(instance, header.epoch, events, starts)
                        : index_.apply(instance, bytes, at, skip, starts);
    }
    nb::list claims;
    for (const ClaimRun& run : applied.claims) {
      claims.append(classes_.claims(tier_of(run.tier), copy_bytes(run.namespace_id).release().ptr(),
                                    copy_bytes(run.hashes).release().ptr(), flag_of(run.is_withdrawn)));
    }
    nb::object stopped = nb::none();
    if (applied.stopped) {
      stopped = classes_.stop_reason(static_cast<int>(*applied.stopped));
    }
    return classes_.applied(number_of(applied.events), number_of(applied.blocks), started.release().ptr(),
                            stopped.release().ptr(), claims.release().ptr(), usages.release().ptr());
  }

  nb::object apply_plain(const nb::list& messages, const nb::list& places) {
    PlainRun run(index_, messages, places);
    PlainApplied applied;
    {
      const GilReleased released;
      applied = kvbm::apply_plain(index_, run.messages, run.places);
    }
    return plain_classes_.made(applied, run.places);
  }

  void begin_blind(std::string_view name, std::uint64_t epoch, const nb::object& pools, const nb::object& likely) {
    const std::uint32_t instance = number_for(name);
    const bool is_known = !pools.is_none();
    const auto listed = is_known ? declared(pools) : std::vector<DeclaredPool>{};
    pools_[instance] = is_known ? nb::object(nb::tuple(pools)) : nb::object(nb::make_tuple());
    index_.begin_blind(instance, epoch, is_known ? &listed : nullptr, declared(likely));
  }

  void miss(std::string_view name) { index_.miss(number_for(name)); }
  void wait(std::string_view name, bool is_waiting) { index_.wait(number_for(name), is_waiting); }
  void exclude(std::string_view name, bool is_excluded) { index_.exclude(number_for(name), is_excluded); }
  bool agrees(std::string_view name, std::uint64_t digest) { return index_.agrees(number_for(name), digest); }

  void drop(std::string_view name) {
    if (const std::uint32_t instance = index_.find_instance(name); instance != ClusterIndex::kNone) {
      index_.drop(instance);
      know(instance, name);
      nb::del(followed_[names_[instance]]);
      names_[instance] = nb::object();  // the number may become another's
      pools_[instance] = nb::make_tuple();
    }
  }

  void claim(std::string_view pool, const nb::bytes& id, const nb::bytes& hashes) {
    index_.claim(pool, namespace_id(id), packed(hashes, "hashes"));
  }
  void unclaim(std::string_view pool, const nb::bytes& id, const nb::bytes& hashes) {
    index_.unclaim(pool, namespace_id(id), packed(hashes, "hashes"));
  }

  void forget_namespace(const nb::bytes& id) { index_.forget_namespace(namespace_id(id)); }

  nb::tuple claims(std::uint64_t first, std::size_t pages) {
    ClaimPart part;
    {
      const GilReleased released;
      part = index_.claims(first, pages);
    }
    nb::list runs;
    for (const PoolClaims& run : part.runs) {
      const std::string pool = index_.pool_name(run.pool);
      runs.append(nb::make_tuple(nb::str(pool.data(), pool.size()), nb::bytes(run.id.data(), run.id.size()),
                                 nb::bytes(run.hashes.data(), run.hashes.size())));
    }
    const bool is_end = part.next == BlockTable::kRankEnd;
    return nb::make_tuple(is_end ? nb::object(nb::none()) : nb::object(nb::int_(part.next)), runs);
  }

  bool sweep(std::size_t pages) {
    const GilReleased released;
    return index_.sweep(pages);
  }

  nb::object audit(std::size_t pages) {
    AuditPart part;
    {
      const GilReleased released;
      part = index_.audit(pages);
    }
    nb::list differing;
    for (const std::uint32_t instance : part.differing) {
      differing.append(nb::steal(name_of(instance)));
    }
    return classes_.audit(flag_of(part.is_whole), number_of(part.blocks), differing.release().ptr(),
                          number_of(part.damaged));
  }

  void report_queued(const std::string& name, std::uint64_t tokens) {
    if (const std::uint32_t number = index_.find_instance(name); number != ClusterIndex::kNone) {
      index_.report_queued(number, static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, 0xFFFFFFFFU)));
    }
  }

  void report_lent_tiers(const std::string& name, std::uint8_t tiers) {
    if (const std::uint32_t number = index_.find_instance(name); number != ClusterIndex::kNone) {
      index_.report_lent_tiers(number, tiers);
    }
  }

  void size_objects(const nb::bytes& id, std::uint64_t blocks) {
    index_.size_objects(namespace_id(id), static_cast<std::uint32_t>(std::min<std::uint64_t>(blocks, 0xFFFFFFFFU)));
  }

  nb::list lent(const nb::bytes& id, const nb::bytes& hashes, std::size_t most, bool is_whole) {
    index_.lent(namespace_id(id), packed(hashes, "hashes"), most, is_whole, lent_);
    nb::list runs;
    for (const LendableRun& one : lent_) {
      runs.append(classes_.lendable(name_of(one.instance), number_of(one.begin), number_of(one.end)));
    }
    return runs;
  }

  // A LookupAnswer: kvbm.catalog.index.lookup.lookup says of what.
  nb::object lookup(const nb::bytes& id, const nb::bytes& hashes, std::size_t limit, nb::handle only, nb::handle shown,
                    nb::handle view_age_s, nb::handle behind) {
    PrefixAnswer answer = std::move(answer_);  // what making an answer lets run may ask, too
    const std::vector<std::uint32_t> wanted = numbers_of(only);
    const Bytes run = packed(hashes, "hashes");
    const NamespaceId space = namespace_id(id);
    index_.prefixes(space, run, limit, answer, only.is_none() ? nullptr : &wanted);
    nb::list instances;
    const bool has_behind = PyObject_IsTrue(behind.ptr()) != 0;
    for (const InstanceDepth& one : answer.instances) {
      instances.append(holding(one, has_behind ? behind : nb::handle()));
    }
    std::vector<nb::object> excluded;
    if (!run.empty()) {
      excluded = excluded_names(space, run.data(), only.is_none() ? nullptr : &wanted);
    }
    nb::list named;
    for (std::size_t at = 0; at < std::min(limit, excluded.size()); ++at) {
      named.append(excluded[at]);
    }
    nb::object made =
        classes_.lookup(Py_NewRef(shown.ptr()), number_of(run.size() / kHashBytes), number_of(answer.deepest),
                        instances.release().ptr(), pool_holdings(answer.pools).release().ptr(), named.release().ptr(),
                        Py_NewRef(view_age_s.ptr()), number_of(answer.more),
                        number_of(excluded.size() - std::min(limit, excluded.size())));
    answer_ = std::move(answer);
    return made;
  }

  nb::object prefixes(const nb::bytes& id, const nb::bytes& hashes, std::size_t best, const nb::object& only,
                      std::uint8_t hottest) {
    if (hottest >= kTierCount) {
      throw nb::value_error("hottest is no Tier");
    }
    // One answer is kept for all calls: they hold the GIL.
    const std::vector<std::uint32_t> wanted = numbers_of(only);
    index_.prefixes(namespace_id(id), packed(hashes, "hashes"), best, answer_, only.is_none() ? nullptr : &wanted,
                    Told::kAll, static_cast<Tier>(hottest));
    nb::object instances = nb::steal(PyList_New(static_cast<Py_ssize_t>(answer_.instances.size())));
    Py_ssize_t at = 0;
    for (const InstanceDepth& one : answer_.instances) {
      PyObject* const tiers = PyTuple_New(kTierCount);
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        NB_TUPLE_SET_ITEM(tiers, static_cast<Py_ssize_t>(tier), number_of(one.by_tier[tier]));
      }
      NB_LIST_SET_ITEM(
          instances.ptr(), at++,
          classes_
              .depth(name_of(one.instance), number_of(one.depth), tiers, number_of(one.reach), flag_of(one.is_suspect))
              .release()
              .ptr());
    }
    nb::list pools;
    for (const PoolDepth& pool : answer_.pools) {
      const std::string name = index_.pool_name(pool.pool);
      pools.append(classes_.pool_depth(nb::str(name.data(), name.size()).release().ptr(), number_of(pool.depth)));
    }
    return classes_.prefixes(number_of(answer_.deepest), instances.release().ptr(), pools.release().ptr(),
                             number_of(answer_.more));
  }

  // See kvbm.core.prompt_batches for the layout.
  nb::bytes encode_prefixes(const nb::bytes& id, const nb::sequence& prompts, std::size_t best, std::uint8_t missed) {
    const NamespaceId space = namespace_id(id);
    std::string told;
    for (const nb::handle prompt : prompts) {
      if (!nb::isinstance<nb::bytes>(prompt)) {
        throw Error(ErrorCode::kLayout, "a prompt is packed hashes, as bytes");
      }
      index_.prefixes(space, packed(nb::borrow<nb::bytes>(prompt), "hashes"), best, answer_);
      put<std::uint32_t>(told, answer_.deepest);
      put<std::uint32_t>(told, answer_.more);
      const std::size_t rows = answer_.instances.size() + answer_.pools.size();
      put<std::uint16_t>(told, static_cast<std::uint16_t>(rows));
      put<std::uint16_t>(told, rows == 0 ? missed : 0);  // 1 byte, and 1 of 0
      prompts_missed_ += rows == 0 ? 1 : 0;
      for (const InstanceDepth& one : answer_.instances) {
        const nb::object name = nb::steal(name_of(one.instance));
        put<std::uint32_t>(told, one.depth);
        put<std::uint32_t>(told, one.reach);
        for (const std::uint32_t blocks : one.by_tier) {
          put<std::uint32_t>(told, blocks);
        }
        put_name(told, one.is_suspect ? kSuspect : 0, text_of(name));
      }
      for (const auto& [depth, name] : in_order(answer_.pools)) {
        put<std::uint32_t>(told, depth);
        told.append(5 * sizeof(std::uint32_t), '\0');
        put_name(told, kPool, name);
      }
    }
    return nb::bytes(told.data(), told.size());
  }

  // A LookupAnswer of something that was found, as JSON; None: nothing was, or a name has letters that JSON escapes.
  nb::object lookup_json(const nb::bytes& id, const nb::bytes& hashes, std::size_t limit, std::string_view shown,
                         std::string_view view_age_s) {
    const NamespaceId space = namespace_id(id);
    const Bytes run = packed(hashes, "hashes");
    index_.prefixes(space, run, limit, answer_);
    if (run.empty() || (answer_.deepest == 0 && answer_.instances.empty() && answer_.pools.empty())) {
      return nb::none();
    }
    const std::vector<nb::object> excluded = excluded_names(space, run.data(), nullptr);
    const std::size_t named = std::min(limit, excluded.size());
    json_.clear();
    json_.begin("namespace").text(shown);
    json_.field("blocks").number(run.size() / kHashBytes).field("deepest").number(answer_.deepest);
    json_.field("instances").open('[');
    for (const InstanceDepth& one : answer_.instances) {
      const nb::object name = nb::steal(name_of(one.instance));
      json_.item().begin("instance").text(text_of(name)).field("depth").number(one.depth);
      json_.field("tiers").open('{');
      for (std::size_t tier = 0; tier < kTierCount; ++tier) {
        if (one.by_tier[tier] != 0) {
          json_.key(text_of(classes_.tier_names[tier])).number(one.by_tier[tier]);
        }
      }
      json_.close('}').field("reach").number(one.reach).field("suspect").flag(one.is_suspect).close('}');
    }
    json_.close(']').field("pools").open('[');
    for (const auto& [depth, name] : in_order(answer_.pools)) {
      json_.item().begin("pool").text(name).field("depth").number(depth).close('}');
    }
    json_.close(']').field("excluded").open('[');
    for (std::size_t at = 0; at < named; ++at) {
      json_.item().text(text_of(excluded[at]));
    }
    json_.close(']').field("view_age_s").raw(view_age_s).field("more").number(answer_.more);
    json_.field("more_excluded").number(excluded.size() - named).close('}');
    const std::string_view told = json_.told();
    return json_.is_plain() ? nb::object(nb::bytes(told.data(), told.size())) : nb::object(nb::none());
  }

  std::uint64_t prompts_missed() const noexcept { return prompts_missed_; }

  nb::list namespaces() const {
    nb::list found;
    for (const NamespaceId& id : index_.namespaces()) {
      found.append(nb::bytes(reinterpret_cast<const char*>(id.data()), id.size()));
    }
    return found;
  }

  nb::object presence(const nb::bytes& id, const nb::bytes& hashes, std::size_t best, const nb::object& only) {
    const std::vector<std::uint32_t> wanted = numbers_of(only);
    PresenceAnswer answer;
    index_.presence(namespace_id(id), packed(hashes, "hashes"), best, answer, only.is_none() ? nullptr : &wanted);
    nb::list rows;
    for (const Presence& row : answer.rows) {
      const nb::bytes held(reinterpret_cast<const char*>(row.held.data()), row.held.size());
      rows.append(
          classes_.presence(holder_of(row.holder).release().ptr(), flag_of(row.is_suspect), Py_NewRef(held.ptr())));
    }
    return classes_.presences(rows.release().ptr(), number_of(answer.more));
  }

  nb::object holders(const nb::bytes& id, const nb::bytes& hash) {
    if (packed(hash, "a block's hash").size() != kHashBytes) {
      throw Error(ErrorCode::kLayout, "one hash is wanted, of 16 bytes");
    }
    nb::list found;
    for (const BlockHolder& holder : index_.holders(namespace_id(id), packed(hash, "a block's hash").data())) {
      found.append(holder_of(holder));
    }
    found.attr("sort")();
    return found;
  }

  nb::object excluded_holders(const nb::bytes& id, const nb::bytes& hash) {
    if (packed(hash, "a block's hash").size() != kHashBytes) {
      throw Error(ErrorCode::kLayout, "one hash is wanted, of 16 bytes");
    }
    nb::list found;
    for (const nb::object& name : excluded_names(namespace_id(id), packed(hash, "a block's hash").data(), nullptr)) {
      found.append(name);
    }
    return found;
  }

  nb::object instances() {
    return nb::steal(PyDict_Keys(followed_.ptr()));  // no walk over the numbers of those that were dropped
  }

  nb::object view(std::string_view name) {
    const std::uint32_t instance = index_.find_instance(name);
    const std::optional<InstanceState> state = instance == ClusterIndex::kNone ? std::nullopt : index_.state(instance);
    if (!state) {
      return nb::none();
    }
    nb::dict counts;
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      if (state->is_listed[tier]) {
        counts[python_tier(*classes_.frames, static_cast<Tier>(tier))] = state->counts[tier];
      }
    }
    number_for(name);  // an index that was loaded knows names that were not asked for yet
    return classes_.view(number_of(state->epoch), flag_of(state->is_stopped), flag_of(state->is_suspect),
                         flag_of(state->is_partial), number_of(state->digest),
                         nb::object(pools_[instance]).release().ptr(), counts.release().ptr(),
                         flag_of(state->is_excluded), flag_of(state->is_waiting), flag_of(state->is_missed));
  }

  nb::object pool_name(std::string_view name, std::uint8_t tier) {
    const std::uint32_t instance = index_.find_instance(name);
    const std::uint32_t pool = instance == ClusterIndex::kNone || tier >= kTierCount
                                   ? ClusterIndex::kNone
                                   : index_.pool_of(instance, static_cast<Tier>(tier));
    return pool == ClusterIndex::kNone ? nb::none() : nb::object(nb::str(index_.pool_name(pool).c_str()));
  }

  nb::object claim_counts() {
    nb::dict counts;
    for (const auto& [pool, count] : index_.claim_counts()) {
      counts[nb::str(pool.data(), pool.size())] = count;
    }
    return counts;
  }

  nb::object anomalies() {
    nb::dict counts;
    const auto found = index_.anomalies();
    for (std::size_t at = 0; at < kAnomalyCount; ++at) {
      if (found[at] != 0) {
        counts[kAnomalyNames[at]] = found[at];
      }
    }
    return counts;
  }

  nb::object memory() {
    const IndexMemory memory = index_.memory();
    nb::dict bytes;
    bytes["table"] = memory.table;
    bytes["sets"] = memory.sets;
    bytes["rest"] = memory.rest;
    return bytes;
  }

  nb::object write_checkpoint(const std::string& path, const nb::bytes& note) {
    const Bytes bytes(static_cast<const std::uint8_t*>(note.data()), note.size());
    const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
    if (file < 0) {
      throw Error(ErrorCode::kCheckpoint, path + " cannot be written (" + std::strerror(errno) + ")");
    }
    CheckpointSize size{};
    {
      const GilReleased released;
      try {
        size = kvbm::write_checkpoint(index_, file, bytes);
      } catch (...) {
        ::close(file);
        throw;
      }
      ::close(file);
    }
    return nb::make_tuple(size.bytes, size.blocks, size.frames);
  }

  nb::bytes load_checkpoint(const std::string& path) {
    std::string note;
    {
      const GilReleased released;
      note = kvbm::load_checkpoint(index_, MappedFile(path).bytes());
    }
    const auto count = static_cast<std::uint32_t>(index_.instance_count());
    for (std::uint32_t instance = 0; instance < count; ++instance) {
      if (index_.state(instance)) {  // not of one that was dropped, whose number may become another's
        know(instance, index_.instance_name(instance));
        pools_[instance] = pools_of(instance);
        for (const nb::handle pool : pools_[instance]) {
          index_.size_blocks(instance, static_cast<Tier>(nb::cast<std::uint8_t>(nb::int_(pool.attr("tier")))),
                             block_bytes_of(pool));
        }
      }
    }
    return nb::bytes(note.data(), note.size());
  }

  const ClusterIndex& index() const noexcept { return index_; }
  ClusterIndex& index() noexcept { return index_; }

 private:
  // The number of an instance; from here on Python has its name and pools.
  std::uint32_t number_for(std::string_view name) {
    const std::uint32_t instance = index_.instance(name);
    know(instance, name);
    return instance;
  }

  void know(std::uint32_t instance, std::string_view name) {
    if (instance >= names_.size()) {
      names_.resize(std::size_t{instance} + 1);
      pools_.resize(names_.size(), nb::make_tuple());
    }
    if (!names_[instance].is_valid()) {
      names_[instance] = nb::str(name.data(), name.size());
      followed_[names_[instance]] = nb::none();
    }
  }

  // The pools of an instance, read from what a checkpoint has of them.
  nb::object pools_of(std::uint32_t instance) const {
    nb::list pools;
    try {
      for (const std::string& words : index_.declared_pools(instance)) {
        pools.append(classes_.decode(nb::bytes(words.data(), words.size()), nb::arg("type") = classes_.pool_stated));
      }
    } catch (const nb::python_error&) {
      throw Error(ErrorCode::kCheckpoint, "the pools of " + index_.instance_name(instance) + " cannot be read");
    }
    return nb::tuple(pools);
  }

  // The numbers of these instances that are known, sorted; none for None.
  std::vector<std::uint32_t> numbers_of(nb::handle names) const {
    std::vector<std::uint32_t> numbers;
    if (!names.is_none()) {
      for (const nb::handle name : names) {
        if (const std::uint32_t number = index_.find_instance(text_of(name)); number != ClusterIndex::kNone) {
          numbers.push_back(number);
        }
      }
      std::sort(numbers.begin(), numbers.end());
    }
    return numbers;
  }

  nb::object holder_of(const BlockHolder& holder) {
    const std::string pool = holder.is_pool ? index_.pool_name(holder.holder) : std::string();
    PyObject* const name = holder.is_pool ? nb::str(pool.data(), pool.size()).release().ptr() : name_of(holder.holder);
    return classes_.holder(name, tier_of(holder.tier), flag_of(holder.is_pool));
  }

  // An InstanceHolding. behind: those that are suspect whatever the index knows; none for nobody.
  nb::object holding(const InstanceDepth& one, nb::handle behind) {
    const nb::object name = nb::steal(name_of(one.instance));
    nb::dict tiers;
    for (std::size_t tier = 0; tier < kTierCount; ++tier) {
      if (one.by_tier[tier] != 0) {
        const nb::object count = nb::steal(number_of(one.by_tier[tier]));
        if (PyDict_SetItem(tiers.ptr(), classes_.tier_names[tier].ptr(), count.ptr()) != 0) {
          throw nb::python_error();
        }
      }
    }
    const bool is_suspect = one.is_suspect || (behind.is_valid() && PySequence_Contains(behind.ptr(), name.ptr()) == 1);
    return classes_.holding(Py_NewRef(name.ptr()), number_of(one.depth), tiers.release().ptr(), number_of(one.reach),
                            flag_of(is_suspect));
  }

  // Pools by depth and name, the deepest first, then by name.
  std::vector<std::pair<std::uint32_t, std::string>> in_order(const std::vector<PoolDepth>& pools) const {
    std::vector<std::pair<std::uint32_t, std::string>> found;
    for (const PoolDepth& pool : pools) {
      found.emplace_back(pool.depth, index_.pool_name(pool.pool));
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
      return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
    return found;
  }

  nb::list pool_holdings(const std::vector<PoolDepth>& pools) const {
    nb::list made;
    for (const auto& [depth, name] : in_order(pools)) {
      made.append(classes_.pool_holding(nb::str(name.data(), name.size()).release().ptr(), number_of(depth)));
    }
    return made;
  }

  // Instances that hold a block in a tier that is excluded, by name. wanted: the instances to look at, sorted; none for
  // all.
  std::vector<nb::object> excluded_names(const NamespaceId& space, const std::uint8_t* hash,
                                         const std::vector<std::uint32_t>* wanted) {
    std::vector<nb::object> names;
    std::uint32_t last = ClusterIndex::kNone;  // the tiers of an instance are side by side
    for (const BlockHolder& holder : index_.holders(space, hash, true)) {
      if (holder.holder != std::exchange(last, holder.holder) &&
          (wanted == nullptr || std::binary_search(wanted->begin(), wanted->end(), holder.holder))) {
        names.push_back(nb::steal(name_of(holder.holder)));
      }
    }
    std::sort(names.begin(), names.end(),
              [](const nb::object& a, const nb::object& b) { return text_of(a) < text_of(b); });
    return names;
  }

  PyObject* tier_of(Tier tier) const { return Py_NewRef(python_tier(*classes_.frames, tier).ptr()); }

  // A new reference.
  PyObject* name_of(std::uint32_t instance) {
    if (instance >= names_.size() || !names_[instance].is_valid()) {
      number_for(index_.instance_name(instance));
    }
    return Py_NewRef(names_[instance].ptr());
  }

  std::vector<DeclaredPool> declared(nb::handle pools) const {
    std::vector<DeclaredPool> found;
    for (const nb::handle pool : pools) {
      const auto tier = nb::cast<std::uint8_t>(nb::int_(pool.attr("tier")));
      auto name = nb::cast<std::string>(pool.attr("name"));
      if (name.empty()) {
        name = nb::cast<std::string>(pool.attr("tier").attr("name").attr("lower")());
      }
      const nb::bytes words(classes_.encode(pool));
      constexpr int kReachPod = 1;
      constexpr int kReachCluster = 2;
      const int reach = nb::cast<int>(nb::int_(pool.attr("reach")));
      found.push_back({static_cast<Tier>(tier), reach == kReachCluster, std::move(name),
                       std::string(words.c_str(), words.size()), reach == kReachPod, block_bytes_of(pool)});
    }
    return found;
  }

  const IndexClasses classes_;        // what answers are made of
  const PlainClasses plain_classes_;  // the same, of runs of plain frames
  ClusterIndex index_;                // the index
  PrefixAnswer answer_;               // of the last query
  JsonText json_;                     // of the last answer that was written as JSON
  std::uint64_t prompts_missed_ = 0;  // of which encode_prefixes has found nothing
  std::vector<LendableRun> lent_;     // the same
  std::vector<nb::object> names_;     // by number, where asked for
  nb::dict followed_;                 // the names of those followed and not dropped, in order
  std::vector<nb::object> pools_;     // as the start declared them, by number
};

// What asks about prompts and blocks.
void bind_asking(nb::class_<PythonIndex>& index, const SharedErrors& errors) {
  using Self = PythonIndex;
  index
      .def(
          "prefixes",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& hashes, std::size_t best, const nb::object& only,
                   std::uint8_t hottest) {
            return translated(errors, [&] { return self.prefixes(id, hashes, best, only, hottest); });
          },
          nb::arg("namespace"), nb::arg("hashes"), nb::arg("best") = 0, nb::arg("only").none() = nb::none(),
          nb::arg("hottest") = 0)
      .def(
          "lookup",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& hashes, std::size_t limit, nb::handle only,
                   nb::handle shown, nb::handle view_age_s, nb::handle behind) {
            return translated(errors, [&] { return self.lookup(id, hashes, limit, only, shown, view_age_s, behind); });
          },
          nb::arg("namespace"), nb::arg("hashes"), nb::arg("limit"), nb::arg("only").none(), nb::arg("shown"),
          nb::arg("view_age_s"), nb::arg("behind"))
      .def(
          "encode_prefixes",
          [errors](Self& self, const nb::bytes& id, const nb::sequence& prompts, std::size_t best,
                   std::uint8_t missed) {
            return translated(errors, [&] { return self.encode_prefixes(id, prompts, best, missed); });
          },
          nb::arg("namespace"), nb::arg("prompts"), nb::arg("best"), nb::arg("missed") = 0)
      .def(
          "lookup_json",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& hashes, std::size_t limit, std::string_view shown,
                   std::string_view view_age_s) {
            return translated(errors, [&] { return self.lookup_json(id, hashes, limit, shown, view_age_s); });
          },
          nb::arg("namespace"), nb::arg("hashes"), nb::arg("limit"), nb::arg("shown"), nb::arg("view_age_s"))
      .def("prompts_missed", &Self::prompts_missed)
      .def(
          "router",
          [](const Self& self, nb::handle settings) { return std::make_unique<PythonRouter>(self.index(), settings); },
          nb::arg("settings"), nb::keep_alive<0, 1>())
      .def("report_queued", &Self::report_queued, nb::arg("instance"), nb::arg("tokens"))
      .def("report_lent_tiers", &Self::report_lent_tiers, nb::arg("instance"), nb::arg("tiers"))
      .def(
          "lent",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& hashes, std::size_t most, bool whole) {
            return translated(errors, [&] { return self.lent(id, hashes, most, whole); });
          },
          nb::arg("namespace"), nb::arg("hashes"), nb::arg("most"), nb::arg("whole"))
      .def(
          "presence",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& hashes, std::size_t best, const nb::object& only) {
            return translated(errors, [&] { return self.presence(id, hashes, best, only); });
          },
          nb::arg("namespace"), nb::arg("hashes"), nb::arg("best") = 0, nb::arg("only").none() = nb::none())
      .def(
          "holders",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& block) {
            return translated(errors, [&] { return self.holders(id, block); });
          },
          nb::arg("namespace"), nb::arg("block"))
      .def(
          "excluded_holders",
          [errors](Self& self, const nb::bytes& id, const nb::bytes& block) {
            return translated(errors, [&] { return self.excluded_holders(id, block); });
          },
          nb::arg("namespace"), nb::arg("block"));
}

}  // namespace

void bind_cluster_index(nb::module_& module, const SharedErrors& errors) {
  using Self = PythonIndex;
  nb::class_<PythonIndex> index(
      module, "ClusterIndex",
      "The cluster's residencies and claims, as kvbm.catalog.index.cluster_index.ClusterIndex.");
  bind_asking(index, errors);
  index.def(nb::init<std::uint64_t>(), nb::arg("capacity"))
      .def(
          "apply",
          [errors](Self& self, const nb::bytes& data, std::size_t at, std::uint32_t skip) {
            return translated(errors, [&] { return self.apply(data, at, skip); });
          },
          nb::arg("data"), nb::arg("at") = 0, nb::arg("skip") = 0)
      .def(
          "apply_plain",
          [errors](Self& self, const nb::list& messages, const nb::list& places) {
            return translated(errors, [&] { return self.apply_plain(messages, places); });
          },
          nb::arg("messages"), nb::arg("places"))
      .def(
          "apply_thread",
          [errors](Self& self) {
            return translated(errors, [&] { return std::make_unique<PythonApplyThread>(self.index()); });
          },
          nb::keep_alive<0, 1>())
      .def(
          "begin_blind",
          [](Self& self, const std::string& name, std::uint64_t epoch, const nb::object& pools,
             const nb::object& likely) { self.begin_blind(name, epoch, pools, likely); },
          nb::arg("instance"), nb::arg("epoch"), nb::arg("pools") = nb::none(), nb::arg("likely") = nb::make_tuple())
      .def(
          "miss", [](Self& self, const std::string& name) { self.miss(name); }, nb::arg("instance"))
      .def(
          "wait", [](Self& self, const std::string& name, bool waiting) { self.wait(name, waiting); },
          nb::arg("instance"), nb::arg("waiting"))
      .def(
          "exclude", [](Self& self, const std::string& name, bool excluded) { self.exclude(name, excluded); },
          nb::arg("instance"), nb::arg("excluded"))
      .def("audit", &Self::audit, nb::arg("pages") = 64)
      .def(
          "agrees", [](Self& self, const std::string& name, std::uint64_t digest) { return self.agrees(name, digest); },
          nb::arg("instance"), nb::arg("digest"))
      .def(
          "drop", [](Self& self, const std::string& name) { self.drop(name); }, nb::arg("instance"))
      .def(
          "claim",
          [errors](Self& self, const std::string& pool, const nb::bytes& id, const nb::bytes& hashes) {
            translated(errors, [&] { self.claim(pool, id, hashes); });
          },
          nb::arg("pool"), nb::arg("namespace"), nb::arg("hashes"))
      .def(
          "unclaim",
          [errors](Self& self, const std::string& pool, const nb::bytes& id, const nb::bytes& hashes) {
            translated(errors, [&] { self.unclaim(pool, id, hashes); });
          },
          nb::arg("pool"), nb::arg("namespace"), nb::arg("hashes"))
      .def(
          "forget_namespace",
          [errors](Self& self, const nb::bytes& id) { translated(errors, [&] { self.forget_namespace(id); }); },
          nb::arg("namespace"))
      .def(
          "size_objects",
          [errors](Self& self, const nb::bytes& id, std::uint64_t blocks) {
            translated(errors, [&] { self.size_objects(id, blocks); });
          },
          nb::arg("namespace"), nb::arg("blocks"))
      .def("namespaces", &Self::namespaces)
      .def("claims", &Self::claims, nb::arg("first") = 0, nb::arg("pages") = 64)
      .def("sweep", &Self::sweep, nb::arg("pages") = 256)
      .def("needs_sweep", [](const Self& self) { return self.index().needs_sweep(); })
      .def("instances", &Self::instances)
      .def(
          "view", [](Self& self, const std::string& name) { return self.view(name); }, nb::arg("instance"))
      .def(
          "pool_name",
          [](Self& self, const std::string& name, std::uint8_t tier) { return self.pool_name(name, tier); },
          nb::arg("instance"), nb::arg("tier"))
      .def("claim_counts", &Self::claim_counts)
      .def("residency_count", [](const Self& self) { return self.index().residency_count(); })
      .def("block_count", [](const Self& self) { return self.index().block_count(); })
      .def("anomalies", &Self::anomalies)
      .def("memory", &Self::memory)
      .def(
          "recomputed_digest",
          [](const Self& self, const std::string& name) {
            const std::uint32_t instance = self.index().find_instance(name);
            const GilReleased released;
            return instance == ClusterIndex::kNone ? 0 : self.index().recomputed_digest(instance);
          },
          nb::arg("instance"))
      .def(
          "write_checkpoint",
          [errors](Self& self, const std::string& path, const nb::bytes& note) {
            return translated(errors, [&] { return self.write_checkpoint(path, note); });
          },
          nb::arg("path"), nb::arg("note") = nb::bytes("", 0))
      .def(
          "load_checkpoint",
          [errors](Self& self, const std::string& path) {
            return translated(errors, [&] { return self.load_checkpoint(path); });
          },
          nb::arg("path"));
}

}  // namespace kvbm::bindings
