"""What a snapshot would heal, instance by instance: who is asked for one, and why."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvbm.core.ids import InstanceId


class InstanceTrouble(msgspec.Struct, kw_only=True):
    """What was found of an instance that a snapshot will heal, counted by kind.

    Attributes:
        gaps: events were missed. digests: its frames, or an audit, have another digest. joins: its epoch was joined mid-stream.
        unended: it has needed a completed snapshot for long, and none has ended.
    """

    gaps: int = 0
    digests: int = 0
    joins: int = msgspec.field(default=0, name="blind")
    unended: int = 0

    @property
    def found(self) -> int:
        """All of it; more than before is news."""
        return self.gaps + self.digests + self.joins + self.unended

    def reasons(self) -> list[str]:
        """In words."""
        words = {
            "events missed": self.gaps, "digest differs": self.digests, "joined midway": self.joins,
            "no completed snapshot": self.unended,
        }  # fmt: skip
        return [reason for reason, count in words.items() if count]


class Troubles:
    """The troubles of all instances.

    Attributes:
        found: how many were found since the start; it only grows.
    """

    def __init__(self) -> None:
        self.found = 0
        self._by_instance: dict[InstanceId, InstanceTrouble] = {}

    @property
    def by_instance(self) -> Mapping[InstanceId, InstanceTrouble]:
        """Everyone a snapshot would heal, and why. Read only."""
        return self._by_instance

    def note(self, instance: InstanceId) -> InstanceTrouble:
        """Something was found; the caller counts it in what this returns."""
        self.found += 1
        return self._by_instance.setdefault(instance, InstanceTrouble())

    def restore(self, instance: InstanceId, trouble: InstanceTrouble) -> None:
        """Take over what a checkpoint has of an instance."""
        self._by_instance[instance] = trouble

    def take(self, instance: InstanceId) -> InstanceTrouble | None:
        """Forget the trouble of an instance: a snapshot has healed it, or no snapshot can."""
        return self._by_instance.pop(instance, None)
