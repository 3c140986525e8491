// ClusterIndex: who holds what in the whole cluster, folded from frames. Fold and listener in one: native
// implementation of kvbm/reference/cluster_index.py. Made empty, fed frames, asked at any time. Writers take turns
// among themselves; each works in short batches under a BatchLock, so any number of readers ask between batches. Every
// public function may be called from any thread.
//
// A residency is a *holder id* (holder_sets.hpp) in the set of its block's holders. A holder id whose bit in its holder
// space's `live` mask is off counts for nobody: so an instance's death, and the end of a snapshot for what it has not
// listed, is a mask that changes. A sweep goes through the table later and takes such ids out; until it has, their
// numbers are not used again. What answers speak of is a second mask, `visible`: the live ids without those of
// instances that are excluded. Only questions look at it, so excluding and returning an instance is a few words
// changed, and costs questions nothing.
//
// An *audit* proves that the running digests are those of the table. It goes through the blocks in an order that no
// growth changes (by shard and place), a stretch at a time, and sums the mixes of what it finds, by instance, tier and
// generation; whatever changes at places it has passed moves these sums as it moves the digests. At the end of a pass
// both are equal, or memory was damaged. It also notes which holder spaces it meets, or somebody has used since it
// began. The others, and namespaces and cluster pools that are in none, are of no block: their numbers are free at its
// end, a pool's unless an instance's claims go to it. Senders choose namespaces and the names of pools, so what one
// instance may bring has a bound until then.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvbm/batch_lock.hpp"
#include "kvbm/block_table.hpp"
#include "kvbm/codec.hpp"
#include "kvbm/event.hpp"
#include "kvbm/holder_sets.hpp"

namespace kvbm {

// One pool as an instance's start declares it, as far as the index needs it.
struct DeclaredPool {
  Tier tier;                      // its tier
  bool is_cluster;                // whether it is everybody's: then its blocks are claims, and their holder is the pool
  std::string name;               // of a cluster pool
  std::string words{};            // the whole declaration, in bytes of the caller's that the index keeps and gives back
  bool is_pod = false;            // whether others read it without its owner: then it is never excluded
  std::uint64_t block_bytes = 0;  // of each block
};

// What an event broke; counted.
enum class IndexAnomaly : std::uint8_t {
  kCreatedTwice,
  kEvictedUnheld,
  kSnapshotAdded,
  kSnapshotIncomplete,
  kSnapshotWithdrew,
  kUnnamedClaim,
  kRefusedAtCapacity,
};
inline constexpr std::size_t kAnomalyCount = 7;

// How far one instance has a prefix; InstanceDepth of kvbm/catalog/index/cluster_index.py.
struct InstanceDepth {
  std::uint32_t instance;                         // its number
  std::uint32_t incarnation;                      // of that number: it was another's before
  std::uint32_t depth;                            // blocks from the first on, in any tier, without a hole
  std::array<std::uint32_t, kTierCount> by_tier;  // of those, by the hottest tier that holds each
  std::uint32_t reach;                            // where the run ends with its cluster pools
  std::uint32_t queued;                           // tokens that wait there, as was reported
  // Its place among all names, in their order: between equals the name decides
  std::uint32_t rank;
  bool is_suspect;  // events of it were missed
};

// What an answer tells of each instance: all, or all but whether it is suspect, which is not asked of those that nobody
// is told of.
enum class Told : std::uint8_t { kAll, kDepths };

// How many blocks of a prefix, from the first on, a cluster pool is claimed to hold.
struct PoolDepth {
  std::uint32_t pool;   // its number
  std::uint32_t depth;  // blocks
};

// The longest run of a prompt's blocks that an instance could lend; LendableRun of kvbm/catalog/index/cluster_index.py.
struct LendableRun {
  std::uint32_t instance;  // its number
  std::uint32_t begin;     // first block, counted from the prompt's
  std::uint32_t end;       // behind the last
};

// Who has how much of a prefix. Kept by its reader from query to query, so that asking allocates nothing.
struct PrefixAnswer {
  std::vector<InstanceDepth> instances;  // those that have, or reach, at least the first block
  std::vector<PoolDepth> pools;          // those that have it
  std::uint32_t deepest = 0;             // the largest depth of all
  std::uint32_t more = 0;                // instances with the first block that were not wanted
};

// One residency or claim of a block.
struct BlockHolder {
  std::uint32_t holder;  // number of the instance or pool
  bool is_pool;          // which of the two
  Tier tier;             // where
};

// The blocks of a question that one holder has in one tier; Presence of kvbm/catalog/index/cluster_index.py.
struct Presence {
  BlockHolder holder;  // who, and where
  bool is_suspect;     // the instance is waiting, partial or missed: see reference/cluster_index.py
  // A bit for each block that was asked for, the first in the lowest bit of the first byte
  std::vector<std::uint8_t> held;
};

// Who has which of some blocks.
struct PresenceAnswer {
  std::vector<Presence> rows;  // instances, those with the most of them first, then pools
  std::uint32_t more = 0;      // instances that have some and were not wanted
};

// A run of claims, or of their withdrawal, in an applied frame.
struct ClaimRun {
  Tier tier;                 // the instance's tier that is a cluster pool
  NamespaceId namespace_id;  // whose blocks
  Bytes hashes;              // packed; points into the frame
  bool is_withdrawn;         // whether the claims are taken back
};

// What a frame did, for those who keep more than the index.
struct AppliedFrame {
  std::uint64_t events = 0;           // events applied
  std::uint64_t blocks = 0;           // blocks their runs named
  std::optional<StopReason> stopped;  // set when the instance ended in it
  std::vector<ClaimRun> claims;       // in order
};

// The state of an instance.
struct InstanceState {
  std::uint64_t epoch = 0;                         // its epoch
  std::uint64_t digest = 0;                        // of what it holds
  bool is_stopped = false;                         // it ended cleanly
  bool is_suspect = false;                         // events were missed, wait, or were refused
  bool is_partial = false;                         // residencies were refused at the cap
  bool is_excluded = false;                        // answers leave out what only it can read
  bool is_waiting = false;                         // later events than the next are there already
  bool is_missed = false;                          // events were missed and no snapshot has ended since
  std::array<std::uint64_t, kTierCount> counts{};  // blocks held by tier
  // Tiers that it declared or holds blocks in, cluster pools left out
  std::array<bool, kTierCount> is_listed{};

  bool operator==(const InstanceState&) const = default;
};

// What a part of an audit found.
struct AuditPart {
  bool is_whole = false;                   // a pass has ended with it
  std::uint64_t blocks = 0;                // of that pass
  std::uint64_t damaged = 0;               // entries whose holders cannot be anybody's; they were taken out
  std::vector<std::uint32_t> differing{};  // numbers of the instances whose digest is not the table's
};

// Claims of one pool in a stretch of the table.
struct PoolClaims {
  std::uint32_t pool;                // its number
  NamespaceId id;                    // of the blocks
  std::vector<std::uint8_t> hashes;  // packed
};

// A stretch of the claims, and where the next one begins.
struct ClaimPart {
  std::uint64_t next = 0;  // BlockTable::kRankEnd when there is none
  std::vector<PoolClaims> runs{};
};

// Bytes by what they are for.
struct IndexMemory {
  std::uint64_t table;  // buckets of blocks
  std::uint64_t sets;   // sets of holders
  std::uint64_t rest;   // instances, holder spaces, namespaces
};

// How many of what senders name there may be; kvbm/reference/cluster_index.py has them too.
inline constexpr std::size_t kMostSpaces = 1 << 20;  // namespaces
// Those that one instance has brought, and those that it holds blocks of
inline constexpr std::size_t kMostSpacesOfOne = 1 << 16;
inline constexpr std::uint32_t kMostPoolsOfOne = 64;  // cluster pools that one instance has brought

class ClusterIndex {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;  // no such instance, pool or namespace

  // capacity: residencies and claims at most; more are refused and counted.
  // secret: what blinds keys; random in production, so that no sender can aim at a bucket or at another namespace's
  // block.
  explicit ClusterIndex(std::uint64_t capacity, std::array<std::uint64_t, 3> secret = random_secret());

  static std::array<std::uint64_t, 3> random_secret();

  // -- following instances --

  // The number of an instance; made when it is new. The number of one that was dropped may become another name's then:
  // its incarnation has grown, and its holder ids are used again only once the table has none of them.
  std::uint32_t instance(std::string_view name);
  std::uint32_t find_instance(std::string_view name) const;
  std::string instance_name(std::uint32_t instance) const;
  std::size_t instance_count() const;

  // Folds the events of a frame from `skip` on. The frame has been checked; an InstanceStarted in it is folded by
  // `starts`. starts: the pools of each InstanceStarted of the frame, in order, skipped ones included.
  AppliedFrame apply(std::uint32_t instance, Bytes data, std::size_t at, std::uint32_t skip,
                     std::span<const std::vector<DeclaredPool>> starts);
  // The same for events that were read already, all of one frame, none to be skipped.
  AppliedFrame apply(std::uint32_t instance, std::uint64_t epoch, std::span<const Event> events,
                     std::span<const std::vector<DeclaredPool>> starts);

  // Enters an epoch whose start was not seen: nothing is held, all of it is suspect.
  // pools: what its start declared, when that is known. likely: the best guess for the names of its claims' pools
  // otherwise.
  void begin_blind(std::uint32_t instance, std::uint64_t epoch, const std::vector<DeclaredPool>* pools,
                   std::span<const DeclaredPool> likely);
  void miss(std::uint32_t instance);
  void wait(std::uint32_t instance, bool is_waiting);
  bool agrees(std::uint32_t instance, std::uint64_t digest);
  // Leaves what the instance has in tiers that only it can read out of answers, or no longer. Holds until told
  // otherwise or dropped.
  void exclude(std::uint32_t instance, bool is_excluded);
  void drop(std::uint32_t instance);
  void claim(std::string_view pool, const NamespaceId& id, Bytes hashes);
  void unclaim(std::string_view pool, const NamespaceId& id, Bytes hashes);

  // Another, random id takes the place of a namespace's: answers and checkpoints know it no more. What is said of it
  // later is of a new namespace. Blocks that somebody still holds of it stay, where nobody finds them.
  void forget_namespace(const NamespaceId& id);

  // The namespaces blocks are held or claimed of, or were since the last audit but one; in the place of forgotten ones
  // stand random ids.
  std::vector<NamespaceId> namespaces() const;

  // Claims of blocks whose rank is at least `first`, of up to this many pages of the table.
  ClaimPart claims(std::uint64_t first, std::size_t pages) const;

  // Tells how many blocks an object holds of a namespace's blocks, in pools whose name does not say it. The smallest
  // that was told counts.
  void size_objects(const NamespaceId& id, std::uint32_t blocks);

  // Tells the bytes of blocks of an instance's pools, which checkpoints have only in their caller's words.
  void size_blocks(std::uint32_t instance, Tier tier, std::uint64_t block_bytes);

  // How many tokens wait at an instance, for the order of answers.
  void report_queued(std::uint32_t instance, std::uint32_t tokens) const;

  // In which tiers others may read what an instance holds: bit t for tier t.
  void report_lent_tiers(std::uint32_t instance, std::uint8_t tiers) const;

  // Takes out what dead holder ids have left, up to this many pages of the table. Whether there is more to do.
  bool sweep(std::size_t pages);
  bool needs_sweep() const;

  // Goes on with the audit for up to this many pages of the table, and ends at the end of a pass. Namespaces that
  // nobody has blocks of, and pools that nobody claims a block of or names, are gone then, unless a checkpoint is being
  // written.
  AuditPart audit(std::size_t pages);

  // Blocks of one object, as the name of a pool says, as in "s3://bucket/kv#blocks=4,sealed"; 0: it does not.
  static std::uint32_t named_blocks(std::string_view pool) noexcept;

  // -- asking --

  // What a cluster pool has of a prefix is whole objects: who reads it can have no part of one.
  // best: how many instances, the deepest first, then those that reach furthest, then those where least waits, then by
  // name; 0 for all, in no order. only: the instances to look at, sorted; none for all. hottest: what instances hold in
  // hotter tiers does not count.
  void prefixes(const NamespaceId& id, Bytes hashes, std::size_t best, PrefixAnswer& answer,
                const std::vector<std::uint32_t>* only = nullptr, Told told = Told::kAll, Tier hottest = Tier{}) const;
  // Who could lend which of these blocks: of each instance its longest run, the first of equals; those that end
  // deepest, then those that begin first, then by name. most: how many. is_whole: blocks behind one that nobody holds
  // are looked at, too.
  void lent(const NamespaceId& id, Bytes hashes, std::size_t most, bool is_whole, std::vector<LendableRun>& runs) const;
  // Which of these blocks are held, and by whom, each by itself. best: how many instances, those with the most blocks
  // first, ties in no order; 0 for all. Pools are named always. only: as prefixes.
  void presence(const NamespaceId& id, Bytes hashes, std::size_t best, PresenceAnswer& answer,
                const std::vector<std::uint32_t>* only = nullptr) const;
  // is_excluded: those that answers leave out instead.
  std::vector<BlockHolder> holders(const NamespaceId& id, const std::uint8_t* hash, bool is_excluded = false) const;
  std::optional<InstanceState> state(std::uint32_t instance) const;
  // Whether events of an instance were missed, wait or were refused; so too of one that is not known.
  bool is_suspect(std::string_view name) const;
  // The pools of an instance in its caller's words; empty when no start was seen.
  std::vector<std::string> declared_pools(std::uint32_t instance) const;
  // Bytes of a block by tier, of instances by number; 0 where no start has told.
  void block_bytes(std::span<const std::uint32_t> instances,
                   std::vector<std::array<std::uint64_t, kTierCount>>& bytes) const;
  // Number of the cluster pool that an instance's claims in a tier belong to, or kNone.
  std::uint32_t pool_of(std::uint32_t instance, Tier tier) const;
  // Also of a pool that was forgotten since the last pass of the audit began: answers name pools by number.
  std::string pool_name(std::uint32_t pool) const;
  // Pools with the blocks claimed of each, in the order of their numbers.
  std::vector<std::pair<std::string, std::uint64_t>> claim_counts() const;
  std::uint64_t residency_count() const;
  // Distinct blocks in the table; those that only dead holder ids had are in it until they are swept.
  std::uint64_t block_count() const;
  std::array<std::uint64_t, kAnomalyCount> anomalies() const;
  IndexMemory memory() const;
  // The digest of an instance, computed anew from the table.
  std::uint64_t recomputed_digest(std::uint32_t instance) const;

 private:
  friend class ClusterIndexTest;  // damages entries, which nothing else can
  friend class CheckpointWriter;
  friend class CheckpointLoader;
  friend class PrefixWalk;
  friend class PresenceScan;
  friend class LentWalk;

  static constexpr std::size_t kBatchBlocks = 64;    // blocks applied under one hold of the lock
  static constexpr std::size_t kFreedAtOnce = 1024;  // numbers looked at under one hold of the lock
  static constexpr std::uint8_t kGenerations = 4;
  static constexpr std::uint16_t kAllVisible = 0xFFFF;
  // In a key of holder_space_numbers_: the holder is a pool
  static constexpr std::uint64_t kPoolKind = std::uint64_t{1} << 63;
  // Namespaces of whose objects the size is kept; kvbm/reference/cluster_index.py has it too
  static constexpr std::size_t kMostSized = 65536;

  struct Namespace {
    NamespaceId id;                                 // its public name
    BlockKey salt;                                  // secret: a block's key is its hash xor this
    std::vector<std::uint32_t> pool_holder_spaces;  // holder spaces of cluster pools
    std::uint32_t holder_spaces = 0;                // how many there are of it, of dead instances left out
    // Number of the instance that brought it; kNone where it came from elsewhere
    std::uint32_t maker = kNone;
    std::uint32_t maker_drops = 0;  // of that number then: it was another's, or another time, before
    bool is_free = false;           // nobody's: the number waits for another
  };

  // A holder in one namespace.
  struct HolderSpace {
    std::uint32_t holder = 0;       // number of the instance or pool
    std::uint32_t space : 31 = 0;   // number of the namespace
    std::uint32_t is_pool : 1 = 0;  // which kind of holder
    std::uint32_t incarnation = 0;  // of the instance when the holder space was made
    std::uint16_t live = 0;         // bit (tier * 4 + generation): that holder id counts
    std::uint16_t visible = 0;      // the same: answers speak of it
  };
  static_assert(sizeof(HolderSpace) == 16);

  // One tier of one instance.
  struct TierFold {
    std::uint64_t listed = 0;                           // blocks the snapshot has listed
    std::uint32_t snapshot = 0;                         // the snapshot last begun
    bool is_open = false;                               // it has begun and not ended
    bool is_whole = false;                              // nothing was missed since a snapshot ended
    bool is_declared = false;                           // the start named a pool in this tier
    bool is_cluster = false;                            // and it is the cluster's
    bool is_pod = false;                                // or others of the pod can read it
    bool is_partial = false;                            // residencies were refused
    bool has_refused = false;                           // the same, since the snapshot began
    std::uint8_t generation = 0;                        // of what is gained or listed now
    std::uint8_t live = 1;                              // bit g: residencies of generation g count
    std::uint8_t dirty = 0;                             // bit g: dead, and the sweep has not been everywhere since
    std::uint32_t pool = kNone;                         // number of the cluster pool, where its name is known
    std::uint64_t block_bytes = 0;                      // as the start named them
    std::array<std::uint64_t, kGenerations> counts{};   // residencies, by generation
    std::array<std::uint64_t, kGenerations> digests{};  // sums of their mixes, by generation
    std::array<std::uint64_t, kGenerations> audited{};  // the same of those that the audit has passed
  };

  struct Instance {
    std::string name;                        // its id
    std::uint64_t epoch = 0;                 // its epoch
    std::uint32_t incarnation = 0;           // counts its deaths
    std::uint32_t drops = 0;                 // how often it was dropped: what it brought before counts for nobody
    std::uint32_t rank = 0;                  // its place in `by_name_`
    bool is_known = false;                   // not dropped
    bool is_listed = false;                  // in `dropped_`
    bool is_stopped = false;                 // it ended cleanly
    bool pools_known = false;                // its start, or somebody who has seen it, told the pools
    bool is_proven = false;                  // pools unknown, but a digest has agreed since a snapshot ended
    bool is_waiting = false;                 // later events than the next are there already
    bool is_excluded = false;                // answers leave out what only it can read
    mutable std::uint32_t queued = 0;        // tokens that wait there; written under the read lock
    mutable std::uint8_t lent_tiers = 0;     // in which others may read: bit t for tier t; written under the read lock
    std::uint16_t visible = kAllVisible;     // the bits of `HolderSpace::live` that answers may speak of
    std::array<TierFold, kTierCount> tiers;  // what it holds
    std::vector<std::uint32_t> holder_spaces;  // its holder spaces of this incarnation
    std::uint32_t made_spaces = 0;             // namespaces that it has brought since it was dropped, whoever uses them
    std::uint32_t made_pools = 0;              // the same of cluster pools
    std::vector<std::string> declared;         // its pools in the caller's words, as the start has them
  };

  struct Pool {
    std::string name;                 // its name
    std::uint64_t claims = 0;         // blocks claimed
    std::uint32_t blocks = 0;         // of one of its objects, where the name says it; else 0
    std::uint32_t holder_spaces = 0;  // how many there are of it
    std::uint32_t named = 0;          // tiers of instances whose claims go to it
    std::uint32_t maker = kNone;      // number of the instance that brought it; kNone where it came from elsewhere
    std::uint32_t maker_drops = 0;    // of that number then
    bool is_free = false;             // nobody's: the number waits for another, and the name until then
  };

  enum class Work : std::uint8_t { kCreate, kState, kEvict, kClaim, kUnclaim };

  // A stretch of a run that waits for its batch.
  struct Piece {
    Work work;                   // what is done with the blocks
    std::uint32_t instance;      // whose event; kNone for claims from elsewhere
    std::uint32_t space;         // namespace
    std::uint32_t holder_space;  // the holder's
    Tier tier;                   // where
    const std::uint8_t* hashes;  // packed
    std::uint32_t count;         // blocks
  };

  // What to do to a set: holder ids from first_removed to last_removed leave it, `added` joins it unless it is 0.
  struct SetChange {
    HolderValue value;       // the set as it is
    HolderId first_removed;  // with last_removed below it, nothing leaves
    HolderId last_removed;
    HolderId added;

    bool operator==(const SetChange&) const = default;
  };

  static std::size_t at_tier(Tier tier) noexcept { return static_cast<std::size_t>(tier); }
  static NamespaceId random_id();

  // -- under writer_ alone --
  void add(const Piece& piece);
  void add_run(Work work, std::uint32_t instance, const NamespaceId& id, Tier tier, Bytes hashes);
  void flush();
  // Also what a call that ran out of memory has left: it points into bytes that are gone.
  void forget_batch() noexcept;
  void run_batch();
  // The number of a namespace, made where there is none. maker: number of the instance that brings it.
  std::uint32_t space_of(const NamespaceId& id, std::uint32_t maker = kNone);
  // The same within the bounds of what an instance may bring; kNone beyond them.
  std::uint32_t bounded_space(const NamespaceId& id, std::uint32_t instance);
  // Names the cluster pools of a start, as many as the instance may bring.
  void name_pools(std::uint32_t instance, std::span<const DeclaredPool> pools);
  std::uint32_t find_pool(std::string_view name) const noexcept;
  // Blocks of an instance's event that are not taken: too many are held, or too much was named.
  void refuse(std::uint32_t instance, Tier tier, std::uint64_t blocks);
  std::uint32_t holder_space_of_instance(std::uint32_t instance, std::uint32_t space);
  // The same within the bounds of what an instance may hold; none is made for what leaves.
  std::uint32_t bounded_holder_space(std::uint32_t instance, std::uint32_t space, Work work);
  std::uint32_t holder_space_of_pool(std::uint32_t pool, std::uint32_t space);
  std::uint32_t new_holder_space(const HolderSpace& holder_space);
  // The number of a pool, made where there is none. maker: number of the instance that brings it.
  std::uint32_t pool_number(std::string_view name, std::uint32_t maker = kNone);
  void take(std::uint32_t instance, std::uint64_t epoch, const Event& event, AppliedFrame& applied,
            std::span<const std::vector<DeclaredPool>> starts, std::size_t& next_start);
  void fold(std::uint32_t instance, const Event& event, AppliedFrame& applied);
  void start(std::uint32_t instance, std::uint64_t epoch, std::span<const DeclaredPool> pools);
  void claim_all(std::string_view pool, const NamespaceId& id, Bytes hashes, Work work);

  // -- under writer_ and lock_ --
  // Makes the number of a name that has none.
  std::uint32_t new_instance(std::string_view name);
  void rank_by_name(std::uint32_t instance);
  void forget_rank(std::uint32_t instance);
  void list_dropped(std::uint32_t number);
  // is_new: the key is not in the table.
  void gain(const Piece& piece, BlockKey key, std::uint64_t place, const std::uint8_t* hash, bool is_new);
  void withdraw(const Piece& piece, BlockKey key, std::uint64_t place, const std::uint8_t* hash);
  void gain_claim(const Piece& piece, BlockKey key, std::uint64_t place);
  void withdraw_claim(const Piece& piece, BlockKey key, std::uint64_t place);
  HolderValue changed(const SetChange& change);
  void set_value(HolderValue* at, std::uint64_t place, HolderValue now);
  bool is_full(const Piece& piece);
  void note_use(std::uint32_t holder_space) noexcept {
    if (holder_space < used_.size()) {
      used_[holder_space] = 1;
    }
  }
  // Frees some of the numbers of holder spaces, namespaces and pools that the audit's pass has found nothing of. False
  // once there are no more.
  bool free_some();
  // owners: gains the instance whose it was.
  void free_holder_space(std::uint32_t number, std::vector<std::uint32_t>& owners);
  void free_space(std::uint32_t number);
  void free_pool(std::uint32_t number);
  // Claims in this tier of an instance go to this pool from now on, or to none.
  void name_pool(TierFold& fold, std::uint32_t pool) noexcept;
  void kill(std::uint32_t instance);
  void declare(Instance& instance, std::span<const DeclaredPool> pools);
  // Computes what answers may speak of, for the instance and its holder spaces.
  void show(Instance& instance);
  void begin_audit();
  void end_audit(AuditPart& part);
  // A residency at this place was gained, or lost with the mix negated.
  void audit_change(TierFold& fold, std::size_t generation, std::uint64_t place, std::uint64_t mix) noexcept {
    fold.audited[generation] += BlockTable::rank(place) < audited_before_ ? mix : 0;
  }
  void begin_snapshot(std::uint32_t instance, Tier tier, std::uint32_t snapshot);
  void end_snapshot(std::uint32_t instance, const SnapshotEnded& event);
  void retire(std::uint32_t instance, Tier tier, std::uint8_t generation);
  void sweep_page(std::size_t shard, std::size_t page);
  void begin_pass();
  void end_pass();
  void sweep_all(std::uint32_t instance, Tier tier);
  HolderValue cleaned(HolderValue value);

  // -- under lock_, shared or not --
  bool is_live(HolderId id) const noexcept {
    return (holder_spaces_[kvbm::holder_space_of(id)].live >> (id & 15) & 1) != 0;
  }
  bool is_visible(HolderId id) const noexcept {
    return (holder_spaces_[kvbm::holder_space_of(id)].visible >> (id & 15) & 1) != 0;
  }
  BlockKey key_of(std::uint32_t space, const std::uint8_t* hash) const noexcept;
  // The live holder id of a holder space in a tier, or 0.
  HolderId find_holder_id(const HolderValue& value, std::uint32_t holder_space, Tier tier) const noexcept;
  bool is_whole(const Instance& instance) const noexcept;
  bool is_partial(const Instance& instance) const noexcept;
  bool is_suspect(const Instance& instance) const noexcept {
    return instance.is_waiting || is_partial(instance) || !is_whole(instance);
  }
  std::uint32_t find_space(const NamespaceId& id) const noexcept;
  // Blocks of one object of a pool, in a namespace; 1 where nobody has said it.
  std::uint32_t object_blocks(std::uint32_t pool, std::uint32_t space) const noexcept;
  void count(IndexAnomaly anomaly, std::uint64_t times = 1) noexcept {
    anomalies_[static_cast<std::size_t>(anomaly)] += times;
  }

  // With a secret: ids are anybody's to choose, and of a known hash many could be made that meet.
  struct IdHash {
    std::array<std::uint64_t, 2> secret;

    std::size_t operator()(const NamespaceId& id) const noexcept;
  };
  struct NameHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view name) const noexcept { return std::hash<std::string_view>{}(name); }
  };
  struct NameEqual {
    using is_transparent = void;
    bool operator()(std::string_view a, std::string_view b) const noexcept { return a == b; }
  };
  using Numbers = std::unordered_map<std::string, std::uint32_t, NameHash, NameEqual>;

  const std::uint64_t capacity_;  // residencies and claims at most
  std::mt19937_64 salts_;         // secrets of namespaces
  mutable std::mutex writer_;     // held by the one who changes anything, frame by frame
  mutable BatchLock lock_;        // held shared to read, exclusively to change what readers see

  BlockTable table_;                                                      // (namespace, hash) → who holds it
  HolderSets sets_;                                                       // the sets of holders
  std::vector<Namespace> spaces_;                                         // by number
  std::vector<Instance> instances_;                                       // by number
  std::vector<Pool> pools_;                                               // by number
  std::vector<HolderSpace> holder_spaces_;                                // by number; 0 is nobody's
  std::unordered_map<NamespaceId, std::uint32_t, IdHash> space_numbers_;  // by id
  Numbers instance_numbers_;                                              // by name
  std::vector<std::uint32_t> by_name_;                                    // instances in the order of their names
  Numbers pool_numbers_;                                                  // by name
  std::unordered_map<NamespaceId, std::uint32_t, IdHash> object_blocks_;  // as was told, by namespace
  // By kind and holder in the high half, and namespace in the low one.
  std::unordered_map<std::uint64_t, std::uint32_t> holder_space_numbers_;
  std::vector<std::uint32_t> free_holder_spaces_;  // numbers to use again
  std::vector<std::uint32_t> free_spaces_;         // the same of namespaces
  std::vector<std::uint32_t> free_pools_;          // the same of pools
  // Pools that this pass of the audit has forgotten
  std::vector<std::uint32_t> left_pools_;
  // Those of the pass before: free when this one ends
  std::vector<std::uint32_t> rested_pools_;
  // Instances that were dropped, and may be followed again
  std::vector<std::uint32_t> dropped_;

  std::uint64_t frames_ = 0;                              // applied
  std::uint64_t residencies_ = 0;                         // live ones of all instances
  std::uint64_t claims_ = 0;                              // (pool, tier, block) claimed
  std::array<std::uint64_t, kAnomalyCount> anomalies_{};  // by rule

  // The namespace and holder space of the run added last, which the next run mostly has too.
  NamespaceId last_id_{};                // the namespace
  std::uint32_t last_instance_ = kNone;  // the instance; kNone when there was none, or it has died since
  std::uint32_t last_space_ = 0;         // number of the namespace
  std::uint32_t last_holder_space_ = 0;  // of the two

  // The batch.
  std::vector<Piece> pieces_;     // what it consists of
  std::size_t piece_blocks_ = 0;  // blocks in it

  // The set change made last, which the next block of a run mostly makes too.
  SetChange last_change_{};        // what it was
  HolderValue last_result_ = 0;    // what it gave
  std::uint64_t last_frees_ = 0;   // sets_.frees() then: results of before a free may be gone
  std::uint64_t last_deaths_ = 0;  // deaths_ then: results hold no holder ids that were dead
  std::uint64_t deaths_ = 0;       // counts changes of live masks from on to off
  std::vector<HolderId> scratch_;  // holder ids of the set being made

  // Deaths that the table has not forgotten yet.
  struct DeadGeneration {
    std::uint32_t instance;     // whose
    std::uint32_t incarnation;  // when
    Tier tier;                  // where
    std::uint8_t generation;    // which
  };
  std::vector<std::uint32_t> dead_holder_spaces_;  // since the pass under way began
  std::vector<DeadGeneration> dead_generations_;   // the same
  std::vector<std::uint32_t> pass_holder_spaces_;  // before it began: free when it ends
  std::vector<DeadGeneration> pass_generations_;   // the same
  bool has_pass_ = false;                          // a sweep is under way
  std::size_t pass_shard_ = 0;                     // where it is
  std::size_t pass_page_ = 0;                      // and in which page
  std::uint64_t pass_moves_ = 0;                   // the shard's moves when the pass came to it
  std::uint32_t pass_ = 0;                         // its number
  std::vector<std::uint32_t> clean_in_;            // by set number: the pass that found all its holder ids alive

  // The audit.
  std::uint64_t audited_before_ = 0;   // blocks of lower rank have been summed; 0 before a pass
  std::uint64_t audited_blocks_ = 0;   // how many the pass has looked at
  std::uint64_t audited_damaged_ = 0;  // of them: holders that cannot be anybody's
  std::size_t unused_at_ = 0;          // holder spaces below this number have been freed, or are used
  std::size_t unused_space_at_ = 0;    // the same of namespaces
  std::size_t unused_pool_at_ = 0;     // the same of pools
  // By number of a holder space that was there when the pass began: it was met or used since
  std::vector<std::uint8_t> used_;
  mutable std::uint32_t checkpoints_ = 0;  // being written: they name namespaces and pools by number; under writer_
};

}  // namespace kvbm
