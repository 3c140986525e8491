"""Why nothing was found for a prompt, for its answer and counted by reason: a wrong namespace would look like a cold
one.

What a caller may not know of is never named, and is told of like what does not exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

import msgspec

from kvbm.catalog.access.callers import Caller
from kvbm.catalog.answers.visibility import NamespaceDeclarations, Visibility
from kvbm.catalog.index.cluster_index import ClusterIndex
from kvbm.core.answers import (
    BlockAnswer,
    FindAnswer,
    LookupAnswer,
    MissedAnswer,
    MissedWhy,
    NearNamespace,
    PresenceAnswer,
)
from kvbm.core.ids import HASH_BYTES, Namespace, NamespaceId, SequenceHash
from kvbm.core.missed import differences, missed, number_of
from kvbm.safe_log import RateLimitedLog

A = TypeVar("A", LookupAnswer, PresenceAnswer, FindAnswer, BlockAnswer)
_LOOKED_AT = 64  # namespaces of one model that are compared with what was asked for
_MOST_OWN = 512  # namespaces of a caller's tenants that are looked at for those of the model
_MOST_TEXT = 200  # characters of a field's value
_MOST_LINES = 20


class LookupsAsked(NamedTuple):
    """Lookups of several prompts of one namespace.

    Attributes:
        key: the namespace to look in, see `Visibility.key`. namespace: as the caller has given it.
        prompts: packed hashes of each.
        limit: instances that are told of each.
    """

    cluster_index: ClusterIndex
    key: NamespaceId
    prompts: Sequence[bytes]
    limit: int
    caller: Caller
    namespace: NamespaceId


class Misses:
    """See the module. One thread.

    Args:
        is_named: whether an instance has named a namespace whose fields are not known.

    Attributes:
        counts: by question and reason, since the start.
    """

    def __init__(
        self, declarations: NamespaceDeclarations, visibility: Visibility, is_named: Callable[[NamespaceId], bool]
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._declarations, self._visibility, self._is_named = declarations, visibility, is_named
        self._by_model: dict[str, list[NamespaceId]] = {}
        self._known_seen = self._removals_seen = 0
        self._limited_log = RateLimitedLog(most=_MOST_LINES)

    def lookup(self, answer: LookupAnswer, caller: Caller, asked: Namespace | NamespaceId) -> LookupAnswer:
        """The answer, with a reason where nothing was found."""
        why = self.why_none(answer, caller, asked)
        return answer if why is None else self.reasoned(answer, "lookup", caller, asked, why)

    def lookups(self, asked: LookupsAsked, are_left_out: bool = True) -> bytes:
        """The answers to lookups in the binary form, with the reason's number where nothing was found.

        Args:
            are_left_out: whether there may be instances that are left out of answers.
        """
        if b"" in asked.prompts:  # of which the reason is another
            return b"".join(self._lookups(asked._replace(prompts=[one]), True) for one in asked.prompts)
        return self._lookups(asked, are_left_out)

    def _lookups(self, asked: LookupsAsked, are_left_out: bool) -> bytes:
        """Those of prompts that either all have blocks or are one."""
        prompts, key = asked.prompts, asked.key
        why = self.why(asked.caller, asked.namespace, len(prompts[0]) if prompts else 1)
        if why != "not_held" or not are_left_out:
            return self._lookups_alike(asked, why)
        answers = []
        of_whom = groupby(
            prompts, lambda one: bool(asked.cluster_index.excluded_holders(key, SequenceHash(one[:HASH_BYTES])))
        )
        for is_excluded, some in of_whom:
            why_these: MissedWhy = "excluded" if is_excluded else "not_held"
            answers.append(self._lookups_alike(asked._replace(prompts=list(some)), why_these))
        return b"".join(answers)

    def _lookups_alike(self, asked: LookupsAsked, why: MissedWhy) -> bytes:
        """Those of prompts of which nothing would be found for the same reason."""
        before = asked.cluster_index.prompts_missed()
        answers = asked.cluster_index.encode_prefixes(asked.key, asked.prompts, asked.limit, number_of(why))
        if times := asked.cluster_index.prompts_missed() - before:
            self.explained("lookup", asked.caller, asked.namespace, why, times)
        return answers

    def presence(self, answer: PresenceAnswer, caller: Caller, asked: Namespace | NamespaceId) -> PresenceAnswer:
        """The same of a question of presence."""
        if answer.holders:
            return answer
        return self.reasoned(answer, "presence", caller, asked, self.why(caller, asked, answer.blocks))

    def find(
        self,
        answer: FindAnswer,
        index: ClusterIndex,
        key: NamespaceId,
        wanted: bytes,
        caller: Caller,
        asked: Namespace | NamespaceId,
    ) -> FindAnswer:
        """The same of a question of what can be read.

        Of blocks that an instance holds and does not lend there is no reason.

        Args:
            key: the namespace to look in, see `Visibility.key`.
            wanted: packed hashes of those that instances were asked for.
        """
        if answer.pools or answer.peers or (answer.blocks and not wanted):
            return answer
        first = index.lookup(key, wanted[:HASH_BYTES], 1, None, answer.namespace, 0.0, ())
        why = self.why_none(first, caller, asked)
        return answer if why is None else self.reasoned(answer, "find", caller, asked, why)

    def block(self, answer: BlockAnswer, caller: Caller, asked: NamespaceId) -> BlockAnswer:
        """The same of a question about one block."""
        return answer if answer.holders else self.reasoned(answer, "block", caller, asked, self.why(caller, asked, 1))

    def watch(self, caller: Caller, asked: Namespace | NamespaceId | None) -> MissedAnswer | msgspec.UnsetType:
        """The reason why a watch of a namespace's blocks has nothing to tell yet: nobody has named the namespace."""
        if asked is None or self.knows(caller, asked):
            return msgspec.UNSET
        return self.explained("watch", caller, asked, "namespace_unknown")

    def why_none(self, answer: LookupAnswer, caller: Caller, asked: Namespace | NamespaceId) -> MissedWhy | None:
        """The reason why a lookup has found nothing; None where it has found something. Nothing is counted."""
        if answer.deepest or answer.instances or answer.pools:
            return None
        return self.why(caller, asked, answer.blocks, is_excluded=bool(answer.excluded))

    def reasoned(self, answer: A, question: str, caller: Caller, asked: Namespace | NamespaceId, why: MissedWhy) -> A:
        """An answer with its reason, which is counted."""
        return msgspec.structs.replace(answer, missed=self.explained(question, caller, asked, why))

    def knows(self, caller: Caller, asked: Namespace | NamespaceId) -> bool:
        """Whether an instance has named a namespace, as far as the caller may know."""
        name = asked.id if isinstance(asked, Namespace) else asked
        return self._visibility.fields(caller, name) is not None or (caller.sees_all and self._is_named(name))

    def why(
        self,
        caller: Caller,
        asked: Namespace | NamespaceId,
        blocks: int,
        full_blocks: int = 0,
        is_excluded: bool = False,
    ) -> MissedWhy:
        """The reason why nothing was found.

        Args:
            asked: the namespace as the caller has given it.
            blocks: that were asked for. full_blocks: of the prompt, where that is known.
            is_excluded: somebody holds the first of them and is left out.
        """
        if not blocks:
            return "no_full_block"
        if not self.knows(caller, asked):
            return "namespace_unknown"
        if is_excluded:
            return "excluded"
        return "hashes_short" if blocks < full_blocks else "not_held"

    def explained(
        self, question: str, caller: Caller, asked: Namespace | NamespaceId, why: MissedWhy, times: int = 1
    ) -> MissedAnswer:
        """The reason as an answer tells it.

        It is counted, so many times, and a namespace nobody has named is a remark.
        """
        self.counts[question, why] += times
        if why != "namespace_unknown":
            return missed(why)
        answer = missed(why, self._near(caller, asked))
        name = asked.id if isinstance(asked, Namespace) else asked
        self._limited_log.warn(
            "namespace.unknown",
            question=question,
            caller=caller.name,
            namespace=name.hex(),
            near=[f"{one.id} has {differences(one)}" for one in answer.near],
            what_to_do="whoever asks gives the fields that the engines have, as /v1/namespaces tells them",
        )
        return answer

    def _near(self, caller: Caller, asked: Namespace | NamespaceId) -> list[NearNamespace]:
        """Known namespaces that the caller may know of: those of the model that was asked for, or else the newest."""
        model = asked.model if isinstance(asked, Namespace) else ""
        found: dict[NamespaceId, Namespace] = {}
        if caller.sees_all:
            by_id = self._declarations.known_namespaces.by_id
            found = {name: by_id[name] for name in self._of_model(model)[-_LOOKED_AT:]} if model else {}
            newest = self._visibility.newest(caller, _LOOKED_AT)
        else:  # only the caller's own are looked at: how long that takes says nothing of others'
            newest = self._visibility.newest(caller, _MOST_OWN)
            found = dict(islice(((name, known) for name, known in newest.items() if known.model == model), _LOOKED_AT))
        shown = found or dict(islice(newest.items(), _LOOKED_AT))
        return [_near(asked, name, known) for name, known in shown.items()]

    def of_model(self, caller: Caller, model: str, most: int) -> list[Namespace]:
        """The namespaces of a model that the caller may know of, at most so many, those that became known last."""
        if caller.sees_all:
            by_id = self._declarations.known_namespaces.by_id
            return [by_id[name] for name in self._of_model(model)[-most:]]
        return [known for known in self._visibility.newest(caller, most).values() if known.model == model]

    def _of_model(self, model: str) -> list[NamespaceId]:
        known = self._declarations.known_namespaces
        if known.removals != self._removals_seen:
            self._by_model, self._known_seen, self._removals_seen = {}, 0, known.removals
        if len(known.by_id) != self._known_seen:
            for name in known.behind(self._known_seen):
                self._by_model.setdefault(known.by_id[name].model, []).append(name)
            self._known_seen = len(known.by_id)
        return self._by_model.get(model, [])


def _near(asked: Namespace | NamespaceId, name: NamespaceId, known: Namespace) -> NearNamespace:
    differs: dict[str, str] = {}
    if isinstance(asked, Namespace):
        differs = {
            field: str(getattr(known, field))[:_MOST_TEXT]
            for field in asked.__struct_fields__
            if getattr(asked, field) != getattr(known, field)
        }
    return NearNamespace(id=name.hex(), model=known.model[:_MOST_TEXT], differs=differs)
