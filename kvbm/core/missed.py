"""Why nothing was found for a prompt: the words, their numbers in the binary form, and what several catalogs say
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvbm.core.answers import MissedAnswer, MissedWhy, NearNamespace

MOST_NEAR = 3
# In the order of which one tells more, where catalogs of parts say several; the number of each in the binary form is
# its place, from 1 on.
WHYS: tuple[MissedWhy, ...] = ("no_full_block", "excluded", "hashes_short", "not_held", "namespace_unknown")
_WORDS: Mapping[MissedWhy, str] = {
    "no_full_block": "the prompt has no full block, and only full blocks are held",
    "excluded": "those that hold the first block are left out: they have stopped, are about to, have fallen silent, "
    "or are of a newer kvbm",
    "hashes_short": "the hashes are fewer than the prompt has full blocks in this namespace: they may be of longer "
    "blocks",
    "not_held": "the namespace is known, and nobody has these blocks: they are new, or hashes of other tokens, or of "
    "another secret or scheme",
    "namespace_unknown": "no instance has named this namespace",
}


def missed(why: MissedWhy, near: Iterable[NearNamespace] = ()) -> MissedAnswer:
    """The reason with its words."""
    kept = sorted(near, key=lambda one: (len(one.differs), one.id))[:MOST_NEAR]
    message = _WORDS[why]
    if why == "namespace_unknown":
        known = "; ".join(f"{one.id} has {differences(one)}" for one in kept)
        message += f"; known are others: {known}" if known else ", and none is known to you"
    return MissedAnswer(why=why, message=message, near=kept)


def differences(near: NearNamespace) -> str:
    """What a known namespace has where it differs from what was asked for, in words."""
    if not near.differs:
        return f"model {near.model!r}"
    return ", ".join(f"{field} {_shown(known)}" for field, known in near.differs.items())


def _shown(text: str) -> str:
    return text if text.isascii() and text.isdigit() else repr(text)


def number_of(why: MissedWhy) -> int:
    """Its number in the binary form, where 0 says nothing."""
    return WHYS.index(why) + 1


def number_in(answer: MissedAnswer | msgspec.UnsetType) -> int:
    """The number of what an answer says; 0 where something was found."""
    return 0 if isinstance(answer, msgspec.UnsetType) else number_of(answer.why)


def missed_of(number: int) -> MissedAnswer | msgspec.UnsetType:
    """What a number of the binary form says; nothing of one that is not known here."""
    return missed(WHYS[number - 1]) if 1 <= number <= len(WHYS) else msgspec.UNSET


def joined_missed(said: Iterable[MissedAnswer | msgspec.UnsetType]) -> MissedAnswer | msgspec.UnsetType:
    """What several catalogs say, none of which has found anything: each knows its own instances."""
    some = [one for one in said if not isinstance(one, msgspec.UnsetType)]
    if not some:
        return msgspec.UNSET
    best = min(some, key=lambda one: WHYS.index(one.why))
    if best.why != "namespace_unknown":
        return best
    return missed(best.why, {near.id: near for one in some for near in one.near}.values())
