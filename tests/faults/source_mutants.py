"""Deliberate defects in the text of production code: each is one line that a tired hand could have written.

They were chosen by reading the code, before looking at what its tests check, so they measure the tests and the
simulator; those in `mutants.py` were made with the simulator, and each has a mix of faults of its own.
`tools/mutants.py` plants them one at a time, and says what notices. README.md has the last verdicts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 60  # of the simulator's generic mix, at most, before a defect counts as one that it does not see


class SourceMutant(NamedTuple):
    """One defect.

    Attributes:
        rule: what no longer holds.
        file: where, from the top of the repository.
        old, new: the text that is there exactly once, and what takes its place.
        test: what fails then: a pytest node id, or a source of `native/tests`.
    """

    rule: str
    file: str
    old: str
    new: str
    test: str

    @property
    def is_native(self) -> bool:
        return self.file.startswith("native/")

    def patched(self, text: str) -> str:
        """The file's text with the defect. Raises ValueError: the text has changed since the defect was written."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has this {text.count(self.old)} times, not once: {self.old!r}")
        return text.replace(self.old, self.new)


_PUBLISHER, _PUBLISHER_WINDOW = "kvbm/streams/publisher/machine.py", "kvbm/streams/publisher/window.py"
_JOURNAL, _JOURNAL_WRITER = "kvbm/streams/journal/journal.py", "kvbm/streams/journal/writer.py"
_JOURNAL_REPAIR, _JOURNAL_DISK = "kvbm/streams/journal/repair.py", "kvbm/streams/journal/disk.py"
_SEQUENCER, _SEQUENCE = "kvbm/catalog/follow/sequencer.py", "kvbm/catalog/follow/instance_sequence.py"
_LIVENESS = "kvbm/catalog/members/liveness.py"
_SQL_WRITER = "kvbm/catalog/follow/sql_writer.py"
_SQL_CLAIMS, _NET_CLAIMS = "kvbm/catalog/sql/claims.py", "kvbm/catalog/sql/net_claims.py"
_COPIES, _INDEX = "kvbm/manager/copies/transfer.py", "native/src/cluster_index.cpp"
_INDEX_UPKEEP = "native/src/index_upkeep.cpp"
_RECONCILE, _WITHDRAWAL = "kvbm/janitor/reconcile.py", "kvbm/janitor/withdrawal.py"
_HOLDINGS, _LANE = "kvbm/janitor/holdings.py", "native/src/block_lane.cpp"

SOURCE_MUTANTS: dict[str, SourceMutant] = {
    # -- publisher -----------------------------------------------------------------------------------------------------
    "window_never_drains": SourceMutant(
        "an acknowledged message leaves its room in the window",
        _PUBLISHER_WINDOW,
        "            self.used_bytes -= sent.size\n",
        "",
        test="tests/unit/test_publisher.py::test_messages_follow_each_other_without_waiting_up_to_the_windows_bytes",
    ),
    "one_ack_one_message": SourceMutant(
        "acks out of order confirm all that is whole",
        _PUBLISHER_WINDOW,
        "        while self._sent and self._sent[0].attempt not in self._in_flight:",
        "        if self._sent and self._sent[0].attempt not in self._in_flight:",
        test="tests/unit/test_publisher.py::test_published_grows_by_acks_without_a_hole_in_whatever_order_they_come",
    ),
    "resumes_at_the_later": SourceMutant(
        "what the server has lost since is sent again",
        _PUBLISHER,
        "            resume = min(resume, self.published)",
        "            resume = max(resume, self.published)",
        test="tests/unit/test_publisher.py::"
        "test_a_stream_that_lost_what_it_had_gets_it_again_and_published_does_not_shrink",
    ),
    "epoch_without_fence": SourceMutant(
        "a fence is set before an epoch's first event",
        _PUBLISHER,
        "        if frames[0].epoch > self._ownership.fence_epoch:",
        "        if frames[0].epoch > self._ownership.fence_epoch + 1:",
        test="tests/unit/test_publisher.py::"
        "test_frames_of_a_later_epoch_wait_for_its_fence_even_if_nobody_said_that_it_began",
    ),
    "idle_after_refusal": SourceMutant(
        "after a refusal the log is looked into again",
        _PUBLISHER,
        "            self._wake_s = self._now_s + self._backoff_s()\n            self._due_s = self._wake_s\n",
        "            self._wake_s = self._now_s + self._backoff_s()\n",
        test="tests/unit/test_publisher.py::"
        "test_from_a_refused_message_on_all_is_sent_again_after_a_wait_and_late_acks_count_for_nothing",
    ),
    # -- journal -------------------------------------------------------------------------------------------------------
    "last_frame_is_a_repeat": SourceMutant(
        "a segment keeps the frame that ends where the next segment begins",
        _JOURNAL_REPAIR,
        "has_repeats = until is not None and frame.next_offset > until",
        "has_repeats = until is not None and frame.next_offset >= until",
        test="tests/integration/test_journal.py::test_a_failed_sync_is_not_forgotten",
    ),
    "segments_go_unpublished": SourceMutant(
        "a segment goes when it is published and before a completed snapshot, not one of the two",
        _JOURNAL,
        "        truncatable = min(published, completed_snapshot)",
        "        truncatable = max(published, completed_snapshot)",
        test="tests/integration/test_journal.py::"
        "test_an_epochs_first_snapshot_is_let_in_beyond_the_capacity_and_nothing_else",
    ),
    "torn_bytes_stay": SourceMutant(
        "what a failed append has left is cut before the next one",
        _JOURNAL_WRITER,
        "            self._device.truncate(self._file, segment.size)\n            self._torn = False\n",
        "            self._torn = False\n",
        test="tests/integration/test_journal.py::"
        "test_half_a_frame_the_device_would_not_take_back_is_gone_before_the_next",
    ),
    "synced_before_the_sync": SourceMutant(
        "bytes count as synced once the sync has succeeded",
        _JOURNAL_WRITER,
        "            self._sync_file(file)\n            segment.synced = size\n",
        "            segment.synced = size\n            self._sync_file(file)\n",
        test="tests/integration/test_journal.py::test_a_failed_sync_is_not_forgotten",
    ),
    "folder_not_synced": SourceMutant(
        "a new name is on the device before anything relies on it",
        _JOURNAL_DISK,
        "    device.replace(temporary, path)\n    device.sync_folder(path.parent)\n",
        "    device.replace(temporary, path)\n",
        test="tests/integration/test_journal.py::test_an_epoch_that_has_begun_outlives_a_power_cut",
    ),
    "journal_short_write": SourceMutant(
        "a write that took a part is gone on with",
        _JOURNAL_DISK,
        "        if pieces:\n            pieces[0] = pieces[0][taken:]\n",
        "        pieces.clear()\n",
        test="tests/integration/test_journal.py::"
        "test_half_a_frame_the_device_would_not_take_back_is_gone_before_the_next",
    ),
    # -- sequencer -----------------------------------------------------------------------------------------------------
    "overlap_applied_twice": SourceMutant(
        "of a frame that was read in part only the rest is applied",
        _SEQUENCE,
        "applied = self._index.apply(data, frame.at, self.position.offset - frame.first_offset)",
        "applied = self._index.apply(data, frame.at, 0)",
        test="tests/unit/test_sequencer.py::test_of_a_frame_that_was_read_in_part_only_the_rest_is_applied",
    ),
    "gap_found_again_and_again": SourceMutant(
        "a gap is found once",
        _SEQUENCE,
        "        if self._is_lost or now_s - since_s < wait_s:",
        "        if now_s - since_s < wait_s:",
        test="tests/unit/test_sequencer.py::test_a_lost_end_is_found_once_however_often_it_is_looked_for",
    ),
    "stored_beyond_the_reorder_buffer": SourceMutant(
        "SQL's place is before whatever is still in a reorder buffer",
        _SEQUENCER,
        "        return min([self.mark, *buffered], key=lambda mark: mark.sequence)",
        "        return max([self.mark, *buffered], key=lambda mark: mark.sequence)",
        test="tests/unit/test_sequencer.py::"
        "test_a_batch_ends_before_what_is_in_the_reorder_buffer_so_that_a_new_start_reads_it_again",
    ),
    "buffer_outlives_its_epoch": SourceMutant(
        "what is in the reorder buffer is applied before a later epoch begins",
        _SEQUENCE,
        "  # not even the start of its epoch came\n            self.pass_holes(changes)\n",
        "  # not even the start of its epoch came\n",
        test="tests/unit/test_sequencer.py::"
        "test_what_is_in_the_reorder_buffer_is_applied_before_an_epoch_that_only_a_heartbeat_names",
    ),
    "buffer_without_bound": SourceMutant(
        "the reorder buffer has a bound",
        "kvbm/catalog/follow/reorder_buffer.py",
        "        if frame.first_offset not in self._frames and self.bytes + size <= REORDER_BYTES:",
        "        if frame.first_offset not in self._frames:",
        test="tests/unit/test_sequencer.py::"
        "test_the_reorder_buffer_has_a_bound_and_the_rest_is_read_when_it_comes_again",
    ),
    "runs_over_reorder_buffers": SourceMutant(
        "an instance with frames in its reorder buffer has decisions to make",
        _SEQUENCE,
        "            and not self.buffer\n            and not self._is_lost\n",
        "            and not self._is_lost\n",
        test="tests/property/test_plain_frames.py::test_runs_leave_what_single_messages_leave",
    ),
    "runs_whatever_fence_they_name": SourceMutant(
        "a message that names another fence is no plain one",
        _SEQUENCE,
        "            and owner_after(named, self.fence) is self.fence\n",
        "",
        test="tests/property/test_plain_frames.py::test_runs_leave_what_single_messages_leave",
    ),
    "runs_heal_nobody": SourceMutant(
        "an instance in trouble is looked at frame by frame",
        _SEQUENCE,
        "            and self._id not in self._suspicions.by_instance\n",
        "",
        test="tests/property/test_plain_frames.py::test_runs_leave_what_single_messages_leave",
    ),
    "a_diverged_message_ends_there": SourceMutant(
        "of a message whose digest differs the rest is applied, too",
        _SEQUENCER,
        "            self._receive(message, changes, applied.diverged_at)\n",
        "            self._receive(message, changes, len(message.data))\n",
        test="tests/property/test_plain_frames.py::test_runs_leave_what_single_messages_leave",
    ),
    "runs_end_with_the_first_frame": SourceMutant(
        "a message is plain as a whole or not at all",
        "native/src/plain_frames.cpp",
        "      while (at < message.data.size()) {\n",
        "      while (at == 0) {\n",
        test="native/tests/test_plain_frames.cpp",
    ),
    # -- liveness ------------------------------------------------------------------------------------------------------
    "deaf_for_too_long": SourceMutant(
        "a catalog that is cut off knows it before anybody counts as silent",
        _LIVENESS,
        "return self._own_s is not None and now_s - self._own_s < self._liveness_s / 2",
        "return self._own_s is not None and now_s - self._own_s < self._liveness_s",
        test="tests/unit/test_liveness.py::"
        "test_a_catalog_that_is_cut_off_knows_it_before_a_silence_that_it_may_have_caused_counts",
    ),
    "first_run_believed_for_ever": SourceMutant(
        "a second run is believed once the first is silent",
        _LIVENESS,
        " and member.heard_s is not None and not member.is_silent:",
        " and member.heard_s is not None:",
        test="tests/unit/test_liveness.py::test_of_two_runs_of_one_epoch_the_first_counts_while_it_lives",
    ),
    "stopped_for_ever": SourceMutant(
        "a later epoch has not stopped because the one before it did",
        _LIVENESS,
        "            member.read_epoch, member.is_stopped = epoch, stopped\n",
        "            member.read_epoch, member.is_stopped = epoch, member.is_stopped or stopped\n",
        test="tests/unit/test_liveness.py::"
        "test_a_start_is_excluded_until_it_was_heard_and_a_pulse_until_its_start_was_read",
    ),
    "half_is_most": SourceMutant(
        "most is more than half",
        _LIVENESS,
        "        return last - first >= LEAST_MASS and 2 * (last - first) > len(heard) - first",
        "        return last - first >= LEAST_MASS and 2 * (last - first) >= len(heard) - first",
        test="tests/unit/test_liveness.py::test_half_that_fall_silent_together_are_excluded",
    ),
    "all_come_back_at_once": SourceMutant(
        "those whom something kept silent are heard one after the other",
        _LIVENESS,
        "            elif member.heard_s is None or now_s - kept_s >= self._liveness_s / 2:\n",
        "            else:\n",
        test="tests/unit/test_liveness.py::test_those_who_come_back_one_after_the_other_are_all_kept",
    ),
    # -- SQL -----------------------------------------------------------------------------------------------------------
    "overtaken_rows_dropped": SourceMutant(
        "rows of a batch that another catalog has overtaken are stored all the same",
        _SQL_WRITER,
        "            self._batch = msgspec.structs.replace(batch, previous=applied.position)\n            return "
        "False\n",
        "            self._batch = None\n            return False\n",
        test="tests/integration/test_sql_writer.py::test_rows_that_another_catalog_has_overtaken_in_part_are_stored",
    ),
    "place_checked_once": SourceMutant(
        "a check that failed is made again",
        _SQL_WRITER,
        "        except BaseException:\n            self._is_unchecked = True\n            raise\n",
        "        except BaseException:\n            raise\n",
        test="tests/integration/test_sql_writer.py::test_a_place_that_could_not_be_checked_is_checked_again",
    ),
    "instances_not_told_again": SourceMutant(
        "after rows were read again the row of every instance is given out",
        _SQL_WRITER,
        "                self._add_all_instances()\n                self._rows.add_namespaces(",
        "                self._rows.add_namespaces(",
        test="tests/integration/test_sql_writer.py::test_instances_that_an_older_copy_does_not_know_are_told_again",
    ),
    "claim_grows_older": SourceMutant(
        "when a claim was last made never goes back",
        _SQL_CLAIMS,
        "WHERE held.last_claimed_ns < excluded.last_claimed_ns - ?6\n",
        "",
        test="tests/conformance/test_store.py::test_a_claim_is_a_set_add_by_any_instance",
    ),
    "withdrawn_in_its_own_batch": SourceMutant(
        "a claim that is withdrawn in the batch that has it does not stand",
        _NET_CLAIMS,
        "        stands = row > np.repeat(last_gone, np.diff(begins, append=len(hashes)))\n",
        "        stands = ~is_withdrawn\n",
        test="tests/conformance/test_store.py::test_claims_and_withdrawals_of_one_batch_count_in_stream_order",
    ),
    "unstored_claims_lost": SourceMutant(
        "claims that SQL refused because it was restored from an older copy reach it",
        _SQL_WRITER,
        "            self._unstored += [*batch.claims, *self._rows.waiting_claims()]\n",
        "            self._unstored += self._rows.waiting_claims()\n",
        test="tests/integration/test_sql_writer.py::"
        "test_claims_that_waited_for_a_database_restored_from_an_older_copy_reach_it_though_the_stream_has_lost_them",
    ),
    # -- copies and offloads -------------------------------------------------------------------------------------------
    "checksums_of_others": SourceMutant(
        "a block is sealed with its own checksum, also where one before it was bad",
        _COPIES,
        "run.proof(kept, result.checksums[kept])",
        "run.proof(kept, result.checksums[: len(kept)])",
        test="tests/integration/test_copies.py::"
        "test_blocks_behind_one_that_did_not_come_are_proved_by_their_own_checksums",
    ),
    "object_in_part": SourceMutant(
        "an object is put whole or not at all",
        _COPIES,
        "return [i for i in indexes if all(other in there for other in range(i // k * k, i // k * k + k))]",
        "return [i for i in indexes if any(other in there for other in range(i // k * k, i // k * k + k))]",
        test="tests/integration/test_copies.py::test_of_an_object_with_a_block_that_cannot_be_read_nothing_is_put",
    ),
    "begun_epoch_is_durable": SourceMutant(
        "an epoch's events after its first snapshot are durable when they are, or when a later epoch's snapshot is",
        "kvbm/manager/record/offsets.py",
        "return self._whole > epoch or self._ends.get(epoch, Offset(0)) >= offset",
        "return self._whole >= epoch or self._ends.get(epoch, Offset(0)) >= offset",
        test="tests/unit/test_offsets.py::test_an_offset_that_never_was_written_counts_once_a_later_snapshot_is_whole",
    ),
    "staged_before_its_withdrawal": SourceMutant(
        "a slot that outlives the process is written once the withdrawal of its block is durable, also through staging",
        _COPIES,
        "        if not may_write and (why := _not_durable(copy, offsets, durable_wait_s)):",
        '        if not may_write and (why := ""):',
        test="tests/integration/test_copies.py::test_a_staged_copy_waits_for_the_withdrawal_of_what_its_slots_hold",
    ),
    # -- janitor -------------------------------------------------------------------------------------------------------
    "deletes_without_lease": SourceMutant(
        "a batch of deletions ends before the lease does",
        _WITHDRAWAL,
        "        yield from self._steps.hold(self._rules.batch_s)\n",
        "",
        test="tests/unit/test_janitor.py::"
        "test_a_janitor_that_sleeps_past_its_lease_deletes_nothing_once_another_has_it",
    ),
    "young_claims_withdrawn": SourceMutant(
        "a claim younger than the listing may be is not withdrawn for want of its object",
        _RECONCILE,
        "        missing = missing[claims.last_ns[missing] < settled_ns]\n",
        "",
        test="tests/unit/test_janitor.py::test_a_claim_that_is_younger_than_its_object_may_be_is_not_missed",
    ),
    "found_objects_weigh_nothing": SourceMutant(
        "what the pool has beside the objects that can be chosen counts towards its quota",
        _HOLDINGS,
        "    over, going = sum(held.values()) + more_bytes - quota_bytes, []",
        "    over, going = sum(held.values()) - quota_bytes, []",
        test="tests/unit/test_janitor.py::test_objects_that_nobody_claimed_count_towards_the_quota_of_the_pool",
    ),
    "used_object_goes_by_quota": SourceMutant(
        "an object chosen by quota that was used meanwhile stays",
        _WITHDRAWAL,
        "                if last_ns <= entry.last_ns and (entry.victim.reason is not EvictReason.TTL or last_ns < "
        "old_ns):",
        "                if entry.victim.reason is not EvictReason.TTL or last_ns <= entry.last_ns and last_ns < "
        "old_ns:",
        test="tests/unit/test_janitor.py::"
        "test_what_is_used_while_the_janitor_looks_stays_though_it_was_chosen_by_quota",
    ),
    # -- RDMA and NIXL -------------------------------------------------------------------------------------------------
    "rdma_without_every_proof": SourceMutant(
        "who READs has proved every namespace of the owner",
        "kvbm/transport/host_lending.py",
        "        has_proved_all = self._namespaces <= opened\n",
        "        has_proved_all = bool(opened)\n",
        test="tests/integration/test_rdma_lending.py::test_who_lacks_a_namespace_is_refused_until_it_proves_it",
    ),
    "rdma_goes_on_with_a_new_namespace": SourceMutant(
        "nobody READs any more who has not proved a namespace that is added",
        "kvbm/transport/host_lending.py",
        "            self._namespaces = known\n            self.revoke()\n",
        "            self._namespaces = known\n",
        test="tests/integration/test_rdma_lending.py::test_who_lacks_a_namespace_is_refused_until_it_proves_it",
    ),
    "what_failed_over_rdma_is_not_read_over_tcp": SourceMutant(
        "what has not come when a way to an owner's memory fails comes in another way in the same read",
        "kvbm/transport/leased.py",
        "first is None or found.retry_s or left_s <= 0",
        "first is None or found.retry_s or found.trouble or left_s <= 0",
        test="tests/integration/test_rdma_reader.py::"
        "test_what_has_not_arrived_when_a_read_fails_comes_in_another_way_at_once",
    ),
    "nixl_hangs_up_on_nobody": SourceMutant(
        "who reads over NIXL is hung up on when a namespace is added, and finds out by no transfer that fails",
        "kvbm/transport/nixl_lending.py",
        "        self._server.hang_up_on_nixl()  #",
        "        #",
        test="tests/integration/test_nixl_managers.py::"
        "test_a_namespace_that_is_added_closes_nixl_until_it_is_proved_and_tcp_serves",
    ),
    # -- native index --------------------------------------------------------------------------------------------------
    "generation_used_before_its_sweep": SourceMutant(
        "a generation is used again once a sweep has passed",
        _INDEX,
        "    fold.dirty = static_cast<std::uint8_t>(fold.dirty | bit);\n",
        "",
        test="native/tests/test_cluster_index.cpp",
    ),
    "claim_then_block_in_one_batch": SourceMutant(
        "a block that its batch has brought as a claim is there",
        _INDEX,
        "          gain_claim(piece, keys[block], places[block]);\n          brought.set(mark);\n",
        "          gain_claim(piece, keys[block], places[block]);\n",
        test="native/tests/test_cluster_index.cpp",
    ),
    "remembered_set_outlives_a_death": SourceMutant(
        "a set made before holder ids died is not given out again",
        _INDEX,
        "  if (change == last_change_ && last_frees_ == sets_.frees() && last_deaths_ == deaths_) {",
        "  if (change == last_change_ && last_frees_ == sets_.frees()) {",
        test="native/tests/test_cluster_index.cpp",
    ),
    "snapshot_in_part_withdraws": SourceMutant(
        "a snapshot that has listed fewer than its end says withdraws nothing",
        _INDEX,
        "  if (!fold.is_open || fold.listed != event.count) {",
        "  if (!fold.is_open) {",
        test="native/tests/test_cluster_index.cpp",
    ),
    "sweep_misses_what_moved": SourceMutant(
        "a sweep begins a part anew whose blocks have moved",
        _INDEX_UPKEEP,
        "    if (pass_moves_ != table_.moves(pass_shard_)) {\n      pass_moves_ = table_.moves(pass_shard_);\n      "
        "pass_page_ = 0;\n    }\n",
        "",
        test="native/tests/test_cluster_index.cpp",
    ),
    "namespaces_used_amid_an_audit_forgotten": SourceMutant(
        "a namespace that is named amid an audit is used",
        _INDEX_UPKEEP,
        "  last_instance_ = kNone;  // so that whoever goes on with a namespace is seen to use it\n",
        "",
        test="native/tests/test_cluster_index.cpp",
    ),
    "namespaces_forgotten_amid_a_checkpoint": SourceMutant(
        "a checkpoint that is being written names namespaces by number, and none is given away meanwhile",
        _INDEX_UPKEEP,
        "  const std::size_t spaces = checkpoints_ == 0 ? spaces_.size() : 0;",
        "  const std::size_t spaces = spaces_.size();",
        test="native/tests/test_checkpoint.cpp",
    ),
    "excluded_shown_in_a_new_space": SourceMutant(
        "an excluded instance is not visible in a namespace that is new to it",
        _INDEX,
        "  holder_space.visible = holder_space.live & instance.visible;",
        "  holder_space.visible = holder_space.live;",
        test="native/tests/test_cluster_index.cpp",
    ),
    "dead_pair_reused_before_its_sweep": SourceMutant(
        "a holder space that blocks may still name is used again once a sweep has passed",
        _INDEX,
        "    is_referenced = is_referenced || fold.dirty != 0;\n",
        "",
        test="native/tests/test_cluster_index.cpp",
    ),
    # -- native lane and block I/O -------------------------------------------------------------------------------------
    "closed_lane_reports_success": SourceMutant(
        "what comes after the close is told that nothing was moved",
        _LANE,
        "  while (Transfer* const transfer = transfers.pop()) {\n    transfer->error = ECANCELED;\n",
        "  while (Transfer* const transfer = transfers.pop()) {\n",
        test="native/tests/test_block_io.cpp",
    ),
    "page_of_somebody_else": SourceMutant(
        "a header's page with anything behind the header proves nothing",
        _LANE,
        "    if (!is_all_zero(flight->room + kProofBytes, kPageBytes - kProofBytes)) {",
        "    if (!is_all_zero(flight->room + kProofBytes, 1)) {",
        test="native/tests/test_block_io.cpp",
    ),
    "short_transfer_is_whole": SourceMutant(
        "a transfer that moved a part has failed",
        _LANE,
        "static_cast<std::size_t>(result) < wanted ? ENODATA\n",
        "static_cast<std::size_t>(result) < wanted ? 0\n",
        test="native/tests/test_block_io.cpp",
    ),
    "padding_of_others": SourceMutant(
        "what pads a block on the device is zeros",
        _LANE,
        "      std::memset(flight.room + kPageBytes + block_bytes, 0, shared_->stride - kPageBytes - block_bytes);\n",
        "",
        test="native/tests/test_block_io.cpp",
    ),
    # -- the ledger's refusals and what its slots wait for -------------------------------------------------------------
    "waits_for_any_withdrawal": SourceMutant(
        "slots wait for the last of their withdrawals, in whatever order they are taken",
        "native/src/tier_slots.cpp",
        "      after = std::max(after, slots_[slot].withdrawn_before);",
        "      after = slots_[slot].withdrawn_before;",
        test="native/tests/test_tier_slots.cpp",
    ),
    "withdrawn_while_pinned_waits_for_nothing": SourceMutant(
        "a slot that was pinned when it was evicted waits for that withdrawal",
        "native/src/tier_slots.cpp",
        "  block.withdrawn_before = applied;\n  if (block.pins > 0) {\n    block.state = SlotState::kOrphaned;\n  } "
        "else {\n",
        "  if (block.pins > 0) {\n    block.state = SlotState::kOrphaned;\n  } else {\n    block.withdrawn_before = "
        "applied;\n",
        test="native/tests/test_tier_slots.cpp",
    ),
    "refused_release_takes_a_part": SourceMutant(
        "a release that is refused leaves its other slots as they were",
        "native/src/ledger.cpp",
        "        state.mark(slot_at(slots, before), SlotState::kAllocated);\n",
        "        static_cast<void>(before);\n",
        test="native/tests/test_ledger.cpp",
    ),
    "refused_unpin_takes_a_part": SourceMutant(
        "an unpin that is refused leaves its other slots as they were",
        "native/src/ledger.cpp",
        "        state.count_pin(slot_at(slots, before));\n",
        "        static_cast<void>(before);\n",
        test="native/tests/test_ledger.cpp",
    ),
    "overflow_keeps_its_source_pinned": SourceMutant(
        "a copy whose room was an overflow pins its source no more",
        "native/src/copies.cpp",
        "    if (from != nullptr) {\n      unpin_run(*from, copy.source_slots);\n    }\n    copies_.erase(begun);\n    "
        "return std::nullopt;",
        "    copies_.erase(begun);\n    return std::nullopt;",
        test="native/tests/test_ledger.cpp",
    ),
    "readable_waits_for_any_withdrawal": SourceMutant(
        "the same in the readable ledger: slots wait for the last of their withdrawals",
        "kvbm/reference/slots.py",
        "                after = max(after, self.free_after.get(slot, Offset(0)))",
        "                after = self.free_after.get(slot, Offset(0))",
        test="tests/unit/test_ledger.py::"
        "test_durable_slots_wait_for_the_last_withdrawal_in_whatever_order_they_are_taken",
    ),
    "readable_withdrawn_while_pinned_waits_for_nothing": SourceMutant(
        "the same in the readable ledger: a slot that was pinned when it was evicted waits for that withdrawal",
        "kvbm/reference/slots.py",
        "        self.free_after[slot] = applied\n        if self.pins.get(slot):\n            "
        "self.orphaned.add(slot)\n        else:\n",
        "        if self.pins.get(slot):\n            self.orphaned.add(slot)\n        else:\n            "
        "self.free_after[slot] = applied\n",
        test="tests/unit/test_ledger.py::test_a_durable_slot_withdrawn_while_it_was_pinned_waits_for_that_withdrawal",
    ),
    "readable_refused_release_takes_a_part": SourceMutant(
        "the same in the readable ledger: a release that is refused leaves its other slots as they were",
        "kvbm/reference/slots.py",
        "                self.allocated.update(slots[:at])\n                raise",
        "                raise",
        test="tests/unit/test_ledger.py::test_a_release_that_is_refused_leaves_its_other_slots_with_the_caller",
    ),
    "readable_refused_unpin_takes_a_part": SourceMutant(
        "the same in the readable ledger: an unpin that is refused leaves its other slots as they were",
        "kvbm/reference/slots.py",
        'it cannot be unpinned")\n        for slot in reversed(slots):\n            left',
        'it cannot be unpinned")\n            left',
        test="tests/unit/test_ledger.py::test_an_unpin_that_is_refused_leaves_its_other_slots_pinned",
    ),
    "readable_overflow_keeps_its_source_pinned": SourceMutant(
        "the same in the readable ledger: a copy whose room was an overflow pins its source no more",
        "kvbm/reference/copies.py",
        "                self._unpin_source(source, source_slots)\n                return None",
        "                return None",
        test="tests/unit/test_ledger.py::test_a_durable_slot_whose_withdrawal_overflows_is_not_written",
    ),
    # -- what was cleared, put off, closed or counted ------------------------------------------------------------------
    "cleared_blocks_are_given": SourceMutant(
        "a request is given nothing that was cleared while it waited",
        "kvbm/manager/acquiring.py",
        "        if self._cancellations != self._copies.cancellations:\n            slots, self._slots, self.depth, "
        'self.hits = self._slots, b"", 0, {}\n            self._ledger.unpin(Tier.HOST, slots)\n            self.why = '
        '"cleared"\n        self._judge()\n',
        "        self._judge()\n",
        test="tests/integration/test_acquiring_cleared.py::"
        "test_a_request_gets_nothing_of_what_was_cleared_while_it_waited_for_the_rest",
    ),
    "replacements_stay": SourceMutant(
        "who took the place of a stuck thread goes when that goes on",
        "kvbm/manager/copies/workers.py",
        'its replacement is one too many."""\n        with self._changed:\n            self._room -= 1\n',
        'its replacement is one too many."""\n        with self._changed:\n            pass\n',
        test="tests/integration/test_late_copies.py::"
        "test_who_took_the_place_of_a_stuck_thread_is_one_too_many_when_that_goes_on",
    ),
    "closed_under_its_reader": SourceMutant(
        "a peer's file is closed after its last reader",
        "kvbm/pools/nvme/pod.py",
        "            file.is_retired = True\n            if file.readers:\n                return\n",
        "            file.is_retired = True\n",
        test="tests/integration/test_pod_folder.py::"
        "test_a_file_that_goes_while_it_is_read_is_closed_after_its_last_reader",
    ),
    "deferred_is_charged": SourceMutant(
        "a run whose time has not come costs its tenant no turn",
        "kvbm/manager/offload/queue.py",
        "        self._fair.spend(tenant, -blocks)\n",
        "",
        test="tests/unit/test_fair_queue.py::test_a_run_whose_time_has_not_come_costs_its_tenant_no_turn",
    ),
    "damage_counted_twice": SourceMutant(
        "what was cut from a segment counts once",
        "kvbm/streams/journal/segments.py",
        "                self.used_bytes -= gone.damaged_bytes\n",
        "",
        test="tests/unit/test_journal_segments.py::"
        "test_what_was_cut_from_a_segment_counts_once_when_its_file_is_begun_anew",
    ),
    "archived_twice": SourceMutant(
        "of a batch that failed in its middle an archive writes each message once",
        "kvbm/catalog/follow/archive.py",
        "            if messages[at].sequence <= self.position.sequence:\n                at += 1\n                "
        "continue\n",
        "",
        test="tests/unit/test_archive.py::test_of_a_batch_that_failed_behind_its_first_file_that_file_is_written_once",
    ),
    # -- checkpoints, other histories, other weights -------------------------------------------------------------------
    "cut_snapshot_ends_whole": SourceMutant(
        "a snapshot that a checkpoint cuts makes nothing whole",
        "native/src/checkpoint.cpp",
        "      fold.is_open = false;\n",
        "      fold.is_open = (tier_flags & kOpen) != 0;\n",
        test="native/tests/test_checkpoint.cpp",
    ),
    "fence_of_a_store_that_is_gone": SourceMutant(
        "no fence of a store that is gone is believed in the next",
        "kvbm/catalog/follow/archive.py",
        "        self._fence_owners.clear()\n        log.warning",
        "        log.warning",
        test="tests/unit/test_archive.py::test_a_fence_of_a_store_that_is_gone_makes_no_stray_of_what_the_next_one_has",
    ),
    "forgotten_by_another_history": SourceMutant(
        "who is forgotten after the stream was renumbered comes back with its next message",
        "kvbm/catalog/follow/sequencer.py",
        "                followed.buffer.begin_anew()\n                followed.spoke = 0\n",
        "                followed.buffer.begin_anew()\n",
        test="tests/unit/test_sequencer.py::"
        "test_who_is_forgotten_after_the_stream_was_renumbered_comes_back_with_its_next_message",
    ),
    "claims_lost_while_loading": SourceMutant(
        "what is claimed and withdrawn while claims are read from SQL counts",
        "kvbm/catalog/follow/sql_writer.py",
        "            for run in self._rows.take_watched():  # claims of another time were brought in meanwhile\n       "
        "         (index.unclaim if run.withdrawn else index.claim)(run.pool, run.namespace, run.hashes)\n",
        "            self._rows.take_watched()\n",
        test="tests/integration/test_sql_writer.py::"
        "test_what_is_claimed_and_withdrawn_while_claims_are_read_from_sql_counts",
    ),
    "rows_without_a_run_win": SourceMutant(
        "rows that do not say whose they are set none back",
        "kvbm/catalog/sql/store.py",
        '        return and_(insert.excluded.run != "", insert.excluded.run != table.c.run)',
        "        return and_(True, insert.excluded.run != table.c.run)",
        test="tests/conformance/test_store.py::test_rows_that_do_not_say_whose_they_are_set_none_back",
    ),
    "moved_block_stays_for_ever": SourceMutant(
        "a block of the prefix cache that moved is withdrawn when it goes",
        "kvbm/engines/vllm/prefix_cache.py",
        "  # only moved to another block\n            self._ours[key] = ours\n",
        "\n            pass\n",
        test="tests/integration/test_vllm_scheduler.py::test_a_block_that_only_moved_stays_in_the_stream_until_it_goes",
    ),
    "moved_block_is_withdrawn": SourceMutant(
        "a block of the prefix cache that only moved is not withdrawn",
        "kvbm/engines/vllm/prefix_cache.py",
        "        elif (ours := self._removed.pop(key, None)) is not None:",
        "        elif (ours := self._removed.get(key)) is not None:",
        test="tests/integration/test_vllm_scheduler.py::test_a_block_that_only_moved_stays_in_the_stream_until_it_goes",
    ),
    "stored_under_another_adapter": SourceMutant(
        "no block of other weights is stored under an adapter",
        "kvbm/engines/vllm/store_planner.py",
        "        return block if state.origin.equals(self._watch.origin_of(block.block_id)) else None",
        "        return block",
        test="tests/integration/test_vllm_scheduler.py::"
        "test_a_block_of_other_weights_under_the_same_number_is_not_stored",
    ),
    "replaced_in_a_stream_that_is_gone": SourceMutant(
        "a fence that was replaced in a stream that is gone says nothing of the next one",
        "kvbm/streams/publisher/ownership.py",
        "            self._replaced.clear()  # of a stream that is gone\n",
        "            pass\n",
        test="tests/unit/test_publisher.py::"
        "test_a_fence_that_it_has_replaced_in_a_stream_that_is_gone_says_nothing_of_the_next_one",
    ),
    "mark_of_another_history": SourceMutant(
        "a mark of another history keeps nobody out of the stream that follows",
        "kvbm/catalog/follow/sequencer.py",
        "            self._forgotten.clear()  # their sequences are of another history\n",
        "",
        test="tests/unit/test_sequencer.py::"
        "test_marks_are_void_in_a_stream_that_begins_anew_and_what_is_kept_of_an_instance_ends_with_its_mark",
    ),
    "signs_of_life_after_a_renumbering": SourceMutant(
        "a message is a sign of life also in a stream whose sequences began anew",
        "kvbm/catalog/members/downtime.py",
        "        elif spoke and spoke != known.spoke:\n",
        "        elif spoke > known.spoke:\n",
        test="tests/unit/test_downtime.py::"
        "test_a_message_is_a_sign_of_life_also_in_a_stream_whose_sequences_began_anew",
    ),
    # -- chosen by somebody who knew no test ---------------------------------------------------------------------------
    "given_up_acquire_still_counts_as_waiting": SourceMutant(
        "who gives an acquire up waits no more",
        "kvbm/manager/acquiring.py",
        "                self._collect_locked()\n                self._loads.end_waiting_locked(self)\n                "
        "self._is_over = True",
        "                self._collect_locked()\n                self._is_over = True",
        test="tests/integration/test_engine_owned_hbm.py::"
        "test_any_order_of_calls_keeps_bytes_right_and_the_stream_true",
    ),
    "late_reads_of_a_lender_count_as_those_of_its_file": SourceMutant(
        "a late read of an instance that lends counts apart from one of its file",
        "kvbm/manager/copies/copies_in_flight.py",
        "        return lender(InstanceId(copy.source)) if self.is_lent(copy) and isinstance(copy.source, str) else "
        "copy.source\n",
        "        return copy.source\n",
        test="tests/integration/test_peer_loads.py::test_late_reads_of_a_peer_count_apart_and_end_by_themselves",
    ),
    "stop_respects_the_pause_after_a_refusal": SourceMutant(
        "a close within the pause after a refused write tries once more",
        "kvbm/manager/record/event_writer.py",
        "if now_s < self._retry_s and published == self._published and not self._stopping:",
        "if now_s < self._retry_s and published == self._published:",
        test="tests/integration/test_manager_turns.py::test_a_close_within_the_pause_after_a_refusal_tries_once_more",
    ),
    "unassigned_namespaces_fall_to_the_first_tenant": SourceMutant(
        "a namespace that is assigned to nobody shares with all others",
        "native/src/slot_allocator.cpp",
        "  share_of_->resize(std::max<std::size_t>(share_of_->size(), index + std::size_t{1}), others);",
        "  share_of_->resize(std::max<std::size_t>(share_of_->size(), index + std::size_t{1}));",
        test="native/tests/test_ledger.cpp",
    ),
    "segments_go_though_the_sync_failed": SourceMutant(
        "no segment goes while what makes it needless is not on the device",
        _JOURNAL,
        '                    log.warning("journal.segments_kept", segments=count, why=str(error))\n                    '
        "return 0\n",
        '                    log.warning("journal.segments_kept", segments=count, why=str(error))\n',
        test="tests/integration/test_journal.py::test_nothing_goes_before_what_makes_it_needless_is_on_the_device",
    ),
    "second_fencing_is_never_taken_over": SourceMutant(
        "a place that was taken back once can be taken back again",
        "kvbm/streams/publisher/ownership.py",
        "        self._is_taking_over = False\n        self._silent_from_s = now_s",
        "        self._silent_from_s = now_s",
        test="tests/unit/test_publisher.py::test_after_other_runs_have_come_and_gone_the_last_epoch_is_whole",
    ),
    "forgotten_instance_stays_among_the_kept": SourceMutant(
        "who is forgotten is not kept either",
        _LIVENESS,
        "        for known in (self._waited, self._kept):",
        "        for known in (self._waited,):",
        test="tests/unit/test_liveness.py::test_who_is_forgotten_is_no_longer_among_those_who_are_kept",
    ),
    "handover_waits_without_end": SourceMutant(
        "a handover that does not end in time lets the catalog go on",
        _SQL_WRITER,
        "                    if time.monotonic() > deadline_s:\n                        return\n",
        "",
        test="tests/integration/test_sql_writer.py::"
        "test_a_handover_that_does_not_end_in_time_lets_the_catalog_go_on_and_is_made_again",
    ),
    "tenants_view_is_renewed_by_count_alone": SourceMutant(
        "a tenant sees what it has declared since another namespace was erased",
        "kvbm/catalog/answers/visibility.py",
        "        if known.removals != self._removals_seen:\n",
        "        if len(known.by_id) < self._known_seen:\n",
        test="tests/unit/test_candidates.py::test_sets_are_what_asking_each_instance_finds",
    ),
    "end_of_stream_is_settled_while_somebody_is_waited_for": SourceMutant(
        "a catalog erases once it has read what those sent whom it waited for last",
        "kvbm/erasure/catalog.py",
        "        if waits:\n            self._settled.pop(erasure.number, None)\n        else:\n            waits = "
        "await self._unread(erasure.number)\n",
        "        if not waits:\n            waits = await self._unread(erasure.number)\n",
        test="tests/unit/test_erasure.py::test_a_catalog_reads_on_to_the_streams_end_since_it_last_waited_for_somebody",
    ),
    "refused_prompt_is_booked_as_routed": SourceMutant(
        "a prompt that nobody is admitted for is remembered for nobody",
        "native/src/router.cpp",
        "  if (is_noted && !ranked_.empty() && ranked_.front().is_admitted) {",
        "  if (is_noted && !ranked_.empty()) {",
        test="native/tests/test_router.cpp",
    ),
    "clear_of_one_namespace_forgets_earlier_clears": SourceMutant(
        "a clear of one namespace keeps the notes of those before it",
        "kvbm/pools/nvme/generations.py",
        "    cleared = {} if namespaces is None else {**record.cleared, **{one.hex(): place for one in namespaces}}",
        "    cleared = {} if namespaces is None else {one.hex(): place for one in namespaces}",
        test="tests/integration/test_nvme_pool.py::test_a_record_of_many_clears_stays_small",
    ),
    "every_miss_prolongs_all_doubts_of_a_peer": SourceMutant(
        "a slot that proved nothing is looked at again after a while, whatever is missed meanwhile",
        "kvbm/pools/nvme/pod.py",
        "            if len(missing) and not peer.doubts:",
        "            if len(missing):",
        test="tests/integration/test_pod_folder.py::"
        "test_a_slot_that_proved_nothing_is_looked_at_again_whatever_is_missed_meanwhile",
    ),
    "opened_namespace_is_served_after_it_was_revoked": SourceMutant(
        "a namespace that is lent no more is not read by who had opened it",
        "native/src/peer_connection.cpp",
        "  if (!opened || !owner_.namespaces.holds(opened->namespace_id, opened->admission)) {",
        "  if (!opened) {",
        test="native/tests/test_peer_server.cpp",
    ),
    "readers_in_use_are_closed_for_new_ones": SourceMutant(
        "a reader in use stays open beyond the most there may be",
        "kvbm/transport/peers.py",
        "if not held.users and key != new and key not in old]",
        "if key != new and key not in old]",
        test="tests/unit/test_peers.py::test_a_reader_in_use_stays_open_beyond_the_most_there_may_be",
    ),
    "other_bytes_behind_a_hole_pass_as_a_repeat": SourceMutant(
        "other bytes for offsets that wait behind a hole are a conflict",
        "kvbm/replay/order.py",
        "            yield Repeat(located) if waiting.located.data == located.data else Conflict(located, frame)",
        "            yield Repeat(located)",
        test="tests/unit/test_replay_order.py::test_other_bytes_and_other_cuts_for_known_offsets_are_conflicts",
    ),
    "copier_wants_every_thread": SourceMutant(
        "where the system gives fewer threads, fewer copy",
        "native/src/row_copy.cpp",
        "    } catch (const std::exception&) {  // no thread or no memory is to be had\n",
        "    } catch (const std::bad_alloc&) {\n",
        test="native/tests/test_row_copy.cpp",
    ),
    "socket_that_nobody_answers_stays": SourceMutant(
        "a server that gets no thread leaves no socket",
        "native/src/peer_server.cpp",
        "      unlink(unix_path_.c_str());  // nobody will ever answer there\n",
        "",
        test="native/tests/test_peer_server.cpp",
    ),
    "connection_without_a_thread_keeps_its_place": SourceMutant(
        "a connection for which there is no thread takes no place",
        "native/src/peer_server.cpp",
        "    ::close(free->fd.exchange(-1));\n",
        "    ::close(free->fd);\n",
        test="native/tests/test_peer_server.cpp",
    ),
    "thread_for_runs_is_asked_for_once": SourceMutant(
        "a catalog that got no thread to apply runs asks for one again",
        "kvbm/catalog/index/plain_frames.py",
        "        if self._thread is None and not self._is_closed:\n",
        "        if self._thread is None and not (self._is_closed or self._is_told):\n",
        test="tests/property/test_plain_frames.py::"
        "test_a_run_for_which_there_is_no_thread_is_applied_at_once_and_the_next_one_asks_again",
    ),
    "interrupted_store_stays_under_way": SourceMutant(
        "a store that an exception ends anywhere can be ended again",
        "kvbm/manager/engine_hbm.py",
        "                ends = True\n",
        "                ends = True\n                self._copies.stores.discard(copy.id)\n",
        test="tests/integration/test_signals.py::"
        "test_a_store_that_an_exception_ends_anywhere_holds_nothing_once_it_is_ended_again",
    ),
}
