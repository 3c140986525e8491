"""What was recorded, for programs: a journal, an archive, a capture or the stream, read as `kvbm-replay` reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from kvbm.assembly.native import NATIVE, NATIVE_FOLD
from kvbm.assembly.pools import journal_folder
from kvbm.assembly.services import nats_url, stream_credentials
from kvbm.config import Settings
from kvbm.core.codec import ScannedFrame
from kvbm.core.errors import ConfigError
from kvbm.core.events import Event
from kvbm.core.ids import Epoch, InstanceId, Offset, split_hashes
from kvbm.streams.nats.permissions import Role

if TYPE_CHECKING:  # who imports kvbm need not replay anything
    from kvbm.replay.source import FrameSource, Located
    from kvbm.replay.state import InstanceState
    from kvbm.replay.verify import Verified
    from kvbm.replay.whatif import WhatIfs


class RecordedEvent(NamedTuple):
    """One event of an instance.

    Attributes:
        epoch, offset: its place in the instance's stream.
        wall_time_ns: when it was told, as Unix time; many events are told together.
        event: BlocksCreated, BlocksMigrated, BlocksEvicted, ResidenciesListed, SnapshotEnded, InstanceStarted,
            InstanceStopped or UsageRecorded.
    """

    instance: InstanceId
    epoch: Epoch
    offset: Offset
    wall_time_ns: int
    event: Event

    def __str__(self) -> str:
        """Place, time and what the event says, with counts and short hashes, in a line."""
        from kvbm.replay.format import event_text, place_text, time_text

        place = place_text(self.epoch, self.offset)
        return f"{self.instance} {place} {time_text(self.wall_time_ns)} {event_text(self.event)}"


class RecordedLog:
    """A log that `open_log` has opened. `with` closes it. Each question reads it from its beginning."""

    def __init__(self, reopen: Callable[[], FrameSource], opened: ExitStack) -> None:
        self._reopen, self._opened = reopen, opened

    def events(self, follow: bool = False) -> Iterator[RecordedEvent]:
        """All events, in the order of the log.

        What was told twice comes twice; what is damaged is left out, and `verify` names it.

        Args:
            follow: of a stream: go on with what comes, without end; leave the loop when you have seen enough.
        Raises: ConfigError: a log in files cannot be followed. JournalError, StreamError, KvbmError: it cannot be read.
        """
        source = self._reopen()
        return _events(_followed(source) if follow else source.read(NATIVE))

    def states(self, at: str = "") -> list[InstanceState]:
        """What each instance held at a place; `lines()` of one gives it in words.

        One that was not there yet is left out.

        Args:
            at: eEPOCH+OFFSET, OFFSET, a time such as 12:30:00, ISO 8601 or Unix seconds; "" for the end.
        Raises: ConfigError: `at` is none of them. JournalError, StreamError, KvbmError: the log cannot be read.
        """
        from kvbm.replay.format import END, parse_at
        from kvbm.replay.state import states_at

        return states_at(self._reopen(), parse_at(at) if at else END, NATIVE, NATIVE_FOLD).instances

    def verify(self) -> Verified:
        """Fold every event, check each, and name what is wrong in `findings`; `verdict()` gives the whole in one line.

        Raises: JournalError, StreamError, KvbmError: the log cannot be read.
        """
        from kvbm.replay.verify import verify

        return verify(self._reopen(), NATIVE, NATIVE_FOLD)

    def close(self) -> None:
        """End what was started for it. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_log(log: str | Path | Settings, timeout_s: float = 5.0) -> RecordedLog:
    """Open what instances have recorded.

    Args:
        log: a journal, an archive, a folder of journals, a capture file, or nats://host:port. Or settings: the stream
            that they name, with their credentials (without `nats.url` that of the embedded nats-server of
            `instance.data_dir`, which is started where it does not run); the instance's journal where `nats.enabled` is
            false.
        timeout_s: how long the server of a stream may keep silent; whoever follows one waits so long until there is a
            stream.
    Raises: ConfigError, StreamError, MissingExtraError, KvbmError: there is nothing of the kind, or it cannot be used.
    """
    from kvbm.replay.opening import OPEN, open_source

    with ExitStack() as opened:
        name, credentials = log, OPEN
        if isinstance(log, Settings):
            name = journal_folder(log)
            if log.nats.enabled:
                name, credentials = nats_url(log, opened), stream_credentials(log, Role.REPLAY)

        def reopen() -> FrameSource:
            return open_source(str(name), timeout_s, credentials)

        reopen()
        return RecordedLog(reopen, opened.pop_all())


def what_if(prompts: Sequence[bytes], block_tokens: int, policies: Sequence[str], capacities: Sequence[int]) -> WhatIfs:
    """What pools of other sizes and policies would have held of prompts; `lines()` gives it as a table.

    Args:
        prompts: packed hashes of each, in the order in which they were asked for.
        block_tokens: of a block.
        policies: of "lru", "s3fifo" and "cost". capacities: slots.
    """
    from kvbm.replay.whatif import Accesses
    from kvbm.replay.whatif import what_if as run

    accesses = Accesses("this program", [(0, split_hashes(one)) for one in prompts], 1, block_tokens, 1.0, [])
    return run(accesses, policies, capacities)


def _followed(source: FrameSource) -> Iterator[Located]:
    from kvbm.replay.live import StreamSource

    if not isinstance(source, StreamSource):
        raise ConfigError(f"{source.name} is read to its end; only a stream can be followed: nats://host:port")
    return source.follow(NATIVE)


def _events(located: Iterator[Located]) -> Iterator[RecordedEvent]:
    for one in located:
        frame = one.found
        if isinstance(frame, ScannedFrame):
            for offset, event in enumerate(NATIVE.decode_frame(one.data)[0].events, frame.first_offset):
                yield RecordedEvent(frame.instance, frame.epoch, Offset(offset), frame.wall_time_ns, event)
