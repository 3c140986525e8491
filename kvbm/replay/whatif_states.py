"""Which states of recurrent layers to store: what would a hybrid model have found of the prompts that were really
asked?

As `whatif`, with pools that hold blocks of attention and states. A prompt is found as far as all its blocks and the
state at that very boundary are held. What is computed leaves a state at each boundary, and a policy says which of them
are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvbm.core.ids import SequenceHash
from kvbm.core.policy import EVICTION_POLICIES
from kvbm.core.state_admission import StateAdmission
from kvbm.progress import Watch
from kvbm.replay.format import counted
from kvbm.replay.whatif import Accesses, Tiers, Unbounded

_ALL = "all"


class StatesWhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One policy for states at one capacity.

    Attributes:
        states: the policy, a key of STATE_POLICIES.
        capacity: slots of each instance's pool, as asked for; 0 for a pool that never evicts.
        hit_blocks: of `blocks` that were asked for, those before the state that a prompt went on from.
        stored_states: how often a state was stored; `stored_blocks`, a block of attention.
    """

    states: str
    capacity: int
    blocks: int
    hit_blocks: int
    hit_ratio: float
    stored_states: int
    stored_blocks: int


class StatesWhatIfs(msgspec.Struct, kw_only=True):
    """All that was tried, by capacity."""

    source: str
    prompts: int
    state_slots: int
    results: list[StatesWhatIf] = []
    notes: list[str] = []

    def lines(self) -> Iterator[str]:
        """A table for people, with shares of what storing all states gives and takes."""
        yield from self.notes
        blocks = self.results[0].blocks if self.results else 0
        slots = counted(self.state_slots, "slot")
        yield f"{counted(self.prompts, 'prompt')}, {counted(blocks, 'block')} asked for, a state takes {slots}"
        whole = {one.capacity: one for one in self.results if one.states == _ALL}
        heads = ("capacity", "states", "hit blocks", "hit ratio", "of all", "states stored", "of all")
        yield "{:>12}  {:<10} {:>12} {:>9} {:>8} {:>13} {:>8}".format(*heads)
        for one in self.results:
            every = whole.get(one.capacity)
            size = f"{one.capacity:,}" if one.capacity else "∞"
            hits = f"{one.hit_blocks / every.hit_blocks:.1%}" if every and every.hit_blocks else ""
            stored = f"{one.stored_states / every.stored_states:.1%}" if every and every.stored_states else ""
            yield (
                f"{size:>12}  {one.states:<10} {one.hit_blocks:>12,} {one.hit_ratio:>9.4f} {hits:>8} "
                f"{one.stored_states:>13,} {stored:>8}"
            ).rstrip()


def what_if_states(
    accesses: Accesses, policies: Sequence[str], capacities: Sequence[int], state_slots: int = 1
) -> StatesWhatIfs:
    """Run policies for states at capacities, evicting what was used longest ago, and once without a limit.

    Args:
        policies: keys of STATE_POLICIES; "all" is run in any case, as what the others are compared with.
        capacities: slots of each instance.
        state_slots: that a state takes, as a model has groups of recurrent layers for each of attention.
    """
    names = list(dict.fromkeys([_ALL, *policies]))
    sizes = [*sorted(set(capacities)), 0]
    notes = list(accesses.notes)
    report = StatesWhatIfs(source=accesses.source, prompts=len(accesses.prompts), state_slots=state_slots, notes=notes)
    with Watch(accesses.source, len(accesses.prompts) * len(names) * len(sizes)) as watch:
        report.results = [_run(accesses, name, size, state_slots, watch) for size in sizes for name in names]
    return report


def _run(accesses: Accesses, policy: str, capacity: int, state_slots: int, watch: Watch) -> StatesWhatIf:
    slots = max(1, round(capacity * accesses.rate)) if capacity else 0
    instances = [HybridPool(policy, slots, state_slots) for _ in range(accesses.instances)]
    asked = hits = 0
    for instance, prompt in accesses.prompts:
        asked += len(prompt)
        hits += instances[instance].ask(prompt)
        watch.done += 1
    scale = 1 / accesses.rate
    return StatesWhatIf(
        states=policy,
        capacity=capacity,
        blocks=round(asked * scale),
        hit_blocks=round(hits * scale),
        hit_ratio=hits / asked if asked else 0.0,
        stored_states=round(sum(one.stored_states for one in instances) * scale),
        stored_blocks=round(sum(one.stored_blocks for one in instances) * scale),
    )


class HybridPool:
    """One instance's pool of blocks and states.

    Args:
        policy: which states are stored, a key of STATE_POLICIES.
        slots: of the pool; 0: it never evicts.
        state_slots: that a state takes.

    Attributes:
        stored_states, stored_blocks: how often something was stored.
    """

    def __init__(self, policy: str, slots: int, state_slots: int = 1) -> None:
        self.stored_states = self.stored_blocks = 0
        self._pool = Tiers([(slots, EVICTION_POLICIES["lru"](slots))]) if slots else Unbounded()
        self._admission = StateAdmission(policy)
        self._parts = [b"state" + bytes([part]) for part in range(state_slots)]

    def ask(self, prompt: list[SequenceHash]) -> int:
        """Serve a prompt.

        Returns how many of its blocks were found; afterwards the pool holds it, with the states that are wanted.
        """
        depth = next((at for at, block in enumerate(prompt) if not self._pool.holds(block)), len(prompt))
        found = next((end for end in range(depth, 0, -1) if self._has_state(prompt[end - 1])), 0)
        self.stored_blocks += len(prompt) - depth
        entries: list[SequenceHash] = []
        for end, block in enumerate(prompt, 1):
            entries.append(block)
            is_held = self._has_state(block)
            if end > found:  # computed, so that it is there to be stored
                uses = self._admission.uses(block, is_end=end == len(prompt), is_parting=end == depth)
                self.stored_states += bool(uses) and not is_held
                is_held = is_held or bool(uses)
            if is_held and end >= found:  # states before the one that was gone on from are not used
                entries += self._state(block)
        self._pool.ask(entries)
        return found

    def _state(self, block: SequenceHash) -> list[SequenceHash]:
        return [SequenceHash(block + part) for part in self._parts]

    def _has_state(self, block: SequenceHash) -> bool:
        return all(self._pool.holds(part) for part in self._state(block))
