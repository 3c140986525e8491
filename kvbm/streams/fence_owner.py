"""Whose events a message of the stream holds.

Each message names the fence that the server compared when it took it, and the server takes no message that names
another one than the last. So what a message names is the last fence of its instance as of then, whatever a reader has
read:

    the run of the last fence that was read   its events
    another run, another sequence             the instance was that run's: the stream has lost the later fence, or the
                                              reader missed it
    another run, the same sequence            a stray: it names a fence of a history that is gone, in which that
                                              sequence was its own (the stream was made anew, or has lost its end);
                                              nobody reads it

A message that names none, as a tool may send one, is believed.
"""

from __future__ import annotations

from kvbm.core.ids import InstanceId
from kvbm.streams.base import Fence, StreamMessage, UnreadableError, fence_of, is_fence, subject_names


def is_stray(named: Fence | None, holder: Fence | None) -> bool:
    """Whether a message is one.

    Args:
        named: by the message. holder: the instance's last fence that was read, or that a message told of.
    """
    return named is not None and holder is not None and named.run != holder.run and named.sequence == holder.sequence


def owner_after(named: Fence | None, holder: Fence | None) -> Fence | None:
    """Who owns the instance once a message that is no stray was taken; the same object when it says nothing new."""
    if named is None or holder is None:
        return named or holder
    if named.run != holder.run:
        return named
    return holder._replace(sequence=named.sequence) if named.sequence > holder.sequence else holder


class FenceOwners:
    """Who owns each instance, for a reader of messages in stream order that keeps nothing else of fences."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, InstanceId], Fence] = {}

    def clear(self) -> None:
        """Another stream is read from here on."""
        self._owners.clear()

    def take(self, message: StreamMessage) -> tuple[bool, Fence | None]:
        """Take a message. Returns whether it counts, and a fence that it tells of and that was not read."""
        key = subject_names(message.subject)
        before = self._owners.get(key)
        if is_fence(message.subject):
            try:
                self._owners[key] = fence_of(message.data, message.sequence, f"message {message.sequence}")
            except UnreadableError:
                return False, None
            return True, None
        if is_stray(message.fence, before):
            return False, None
        after = owner_after(message.fence, before)
        if after is not None:
            self._owners[key] = after
        return True, None if before is None or after is None or after.run == before.run else after
