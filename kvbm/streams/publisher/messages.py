"""What goes into a `Publisher` and what comes out: inputs are what has happened, effects are what to do."""

from __future__ import annotations

from typing import NamedTuple

from kvbm.core.ids import Epoch
from kvbm.streams.base import EpochRuns, Fence, Heartbeat, Position, Tail


class Connected(NamedTuple):
    """A connection stands.

    Attributes:
        attempt: of the Connect that this answers.
        fence, tail: what the stream holds of this instance.
        message_bytes: the most that one message may have.
        in_flight: messages that may be under way at a time; 0: any number.
    """

    attempt: int
    fence: Fence | None
    tail: Tail | None
    message_bytes: int
    in_flight: int = 0


class Disconnected(NamedTuple):
    """The connection is lost, or could not be made.

    Attributes:
        stands: it is there, and what a Connect asked was not answered.
    """

    reason: str
    stands: bool = False


class Appended(NamedTuple):
    """The log may have more."""


class Acked(NamedTuple):
    """The stream has stored a message."""

    attempt: int


class FenceSet(NamedTuple):
    """The stream has stored the fence."""

    attempt: int
    fence: Fence


class Refused(NamedTuple):
    """The stream did not take a message or a fence, for another reason than the fence.

    Attributes:
        away: it has no leader now, or does not answer: nobody has looked at what was sent.
    """

    attempt: int
    reason: str
    away: bool = False


class FencedOff(NamedTuple):
    """The stream did not take a message or a fence, because the fence is another one by now."""

    attempt: int
    reason: str


class FenceRead(NamedTuple):
    """The fence that the stream holds.

    Attributes:
        asked: sequence of the ReadFence that this answers.
    """

    asked: int
    fence: Fence | None


class EpochBegun(NamedTuple):
    """The manager is in this epoch."""

    epoch: Epoch


class SnapshotBegan(NamedTuple):
    """The manager begins to state what it holds: the fence is to be as young as the snapshot."""


class StreamRetention(NamedTuple):
    """How long the stream keeps a message; 0 for ever."""

    max_age_s: float


class Pulse(NamedTuple):
    """The instance's last heartbeat that the stream has."""

    heartbeat: Heartbeat | None


class PublisherTicked(NamedTuple):
    """Time has passed."""


Input = (
    Connected
    | Disconnected
    | Appended
    | Acked
    | FenceSet
    | Refused
    | FencedOff
    | FenceRead
    | EpochBegun
    | SnapshotBegan
    | StreamRetention
    | Pulse
    | PublisherTicked
)


class Connect(NamedTuple):
    """Learn fence and tail. Answer with Connected or Disconnected.

    Attributes:
        anew: drop the connection, if there is one, and make a new one first.
    """

    attempt: int
    anew: bool


class Publish(NamedTuple):
    """Send one message, behind those of earlier effects. Answer with Acked, Refused, FencedOff or Disconnected.

    Attributes:
        attempt: tells this sending from every other.
        data: whole frames of one epoch.
        through: where they end.
        fence: the one it names.
        acked: see `Tail.acked`.
    """

    attempt: int
    data: bytes
    through: Position
    fence: Fence
    acked: Position


class SetFence(NamedTuple):
    """Move the fence, if it is still where it was. Answer with FenceSet, Refused, FencedOff or Disconnected.

    Attributes:
        log: see `Fence.log`.
    """

    attempt: int
    epoch: Epoch
    run: str
    expected: int
    log: EpochRuns = ()


class ReadFence(NamedTuple):
    """See who owns the instance: who publishes nothing is never refused. Answer with FenceRead or Disconnected.

    Attributes:
        sequence: of the fence that is there as far as is known.
    """

    sequence: int


class AskPulse(NamedTuple):
    """Read the instance's last heartbeat. Answer with Pulse or Disconnected."""


class ReportFenced(NamedTuple):
    """Log that another run owns the instance, so nothing is published.

    Attributes:
        epoch: that run's, as far as is known.
        run: "" when only its events are known.
    """

    epoch: Epoch
    run: str


class TakeOver(NamedTuple):
    """Have the manager begin an epoch later than this one: the run that owns the instance is silent.

    Answer with EpochBegun.
    """

    epoch: Epoch


class PublisherWakeAt(NamedTuple):
    """Step with PublisherTicked at this time, if nothing comes before."""

    at_s: float


Effect = Connect | Publish | SetFence | ReadFence | AskPulse | ReportFenced | TakeOver | PublisherWakeAt
