"""What either half of the connector counts, as plain data that vLLM carries from process to process."""

from __future__ import annotations

from typing import Any

COUNTERS = {
    "loaded_bytes": "Bytes that ranks copied from HOST to HBM.",
    "loaded_blocks": "Parts of blocks that ranks copied from HOST to HBM.",
    "stored_bytes": "Bytes that ranks copied from HBM to HOST.",
    "stored_blocks": "Parts of blocks that ranks copied from HBM to HOST.",
    "failed_loads": "Loads that a rank could not carry out; their requests are computed.",
    "failed_stores": "Stores that a rank could not carry out; their blocks stay in HBM alone.",
    "stores_skipped": "Blocks not stored because HOST had no slot for them.",
    "states_unwanted": "States of recurrent layers that were offered and not stored, by `offload.states`.",
    "states_lost": "States of recurrent layers that were offered too late to be stored: their request had ended or "
    "lost its blocks.",
    "predicted_blocks": "Blocks that own tiers, the pod's folder or the catalog were said to have, of requests for "
    "which some had to be fetched.",
    "delivered_blocks": "Blocks of `predicted_blocks` that came to HOST, or lay there.",
    "unanswered_finds": "Requests for which the catalog was asked and did not answer in time.",
    "late_acquires": "Requests that did not wait for all their blocks to reach HOST.",
    "duplicates": "Blocks that the engine's prefix cache held already when it computed them again.",
    "handoffs": "Prompts that were computed here to be decoded elsewhere, and are kept for that.",
    "handoffs_refused": "Requests whose `kv_transfer_params` speak of the blocks of another prompt, model or tenant.",
    "verified_reads": "Blocks whose checksum was found right on their way from a colder tier.",
    "peer_blocks": "Blocks of `hit_blocks` that another instance lent; they count there as of HOST.",
    "corrupt_blocks": "Blocks whose checksum was found wrong on their way from a colder tier; they were computed.",
}
COUNTERS_BY_TIER = {
    "hit_blocks": "Blocks that requests got from a tier instead of computing them.",
}
COUNTERS_BY_WHY = {
    "parked_prompts": "Prompts whose blocks HOST keeps for a while: for a decoder (handoff), for their next turn "
    "(turn), after a preemption (preempted).",
    "undelivered_blocks": "Blocks of `predicted_blocks` that did not come: late, slower (than computing them), no_room "
    "(in HOST), unread, cleared.",
}
GAUGES = {
    "parked_blocks": "Blocks that HOST keeps for prompts that go on.",
    "acquiring_requests": "Requests whose blocks are on their way to HOST.",
    "storing_blocks": "Blocks of the engine held until they are in HOST.",
}
TIMES = {
    "load_seconds": "Time a rank copied for one load.",
    "store_seconds": "Time a rank copied for one store.",
}


class Numbers:
    """Counts since they were last taken.

    Attributes:
        data: name → a counter's sum, a gauge's last value, a time's list; of a counter by tier or reason, that → sum.
            Only what was counted.
    """

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}

    def add(self, name: str, count: float) -> None:
        """Count up a counter."""
        if count:
            self.data[name] = self.data.get(name, 0) + count

    def add_of(self, name: str, label: str, count: float) -> None:
        """Count up a counter by tier, or by reason."""
        if count:
            sums = self.data.setdefault(name, {})
            sums[label] = sums.get(label, 0) + count

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def time(self, name: str, seconds: float) -> None:
        """Note how long something took."""
        self.data.setdefault(name, []).append(seconds)

    def take(self) -> dict[str, Any]:
        """What was counted since the last call; empty when nothing was."""
        data, self.data = self.data, {}
        return data


def merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    """Take in what was counted elsewhere, or later."""
    for name, value in other.items():
        if name in TIMES:
            into[name] = [*into.get(name, ()), *value]
        elif name in COUNTERS_BY_TIER or name in COUNTERS_BY_WHY:
            known = into.get(name, {})
            into[name] = known | {tier: known.get(tier, 0) + count for tier, count in value.items()}
        elif name in GAUGES:
            into[name] = value
        else:
            into[name] = into.get(name, 0) + value
