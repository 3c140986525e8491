"""What a stream carries and how it is read.

Frames travel as the bytes that were cut once; nobody encodes them again.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from kvbm.core.ages import TierAges
from kvbm.core.codec import FrameBytes, decode_frame, decode_header
from kvbm.core.errors import ConfigError, FrameError, StreamError
from kvbm.core.fetching import Transfer
from kvbm.core.ids import MAX_NAME_BYTES, Epoch, InstanceId, NamespaceId, Offset, Tier
from kvbm.core.lent import LentCounts
from kvbm.core.parts import ALL_PARTS, part_of, part_word

EVENTS_PREFIX = "kvbm.v1.events"
FENCE_PREFIX = "kvbm.v1.fence"  # in the stream of the events, so that both share one order
PULSE_PREFIX = "kvbm.v1.pulse"
SNAPSHOTS_PREFIX = "kvbm.v1.rounds"  # requests to an instance, kept by nobody
SAMPLES_PREFIX = "kvbm.v1.samples"
ROUTES_PREFIX = "kvbm.v1.routes"  # what each catalog has routed, for the others
ERASE_PREFIX = "kvbm.v1.erase"  # what is to be erased, in a stream of its own
ERASED_PREFIX = "kvbm.v1.erased"  # how far each has come with it
ASKS_KEPT = 64  # of each kind that a slow watcher has not taken yet; beyond it the oldest goes
SAMPLES_KEPT = 4_000
ROUTES_KEPT = 256  # messages

# What a fence may say: whoever may write one may write anything.
_MOST_EPOCH = 1 << 63
MOST_RUN = 128  # characters
_FENCE_EPOCHS = 128
_FENCE_BEGINS = f"{FENCE_PREFIX}."
_BAD_IN_NAME = re.compile(r"[\s.*>\x00-\x20\x7f]")


class Position(NamedTuple):
    """A place in an instance's stream: everything before `offset` of `epoch` is behind it. Ordered."""

    epoch: Epoch
    offset: Offset


ORIGIN = Position(Epoch(0), Offset(0))  # before everything


EpochRuns = tuple[tuple[Epoch, str], ...]  # epochs, ascending, and the run of the process that began each


class Fence(NamedTuple):
    """Who may publish an instance's events: what its last fence message says. A new epoch, and a new run, move it.

    Attributes:
        run: of the process that set it; random, made at its start. Tells two processes of one epoch apart.
        sequence: of the fence message in the stream; a publish that names another one is refused by the server.
        log: the epochs whose events may follow it, and the run that began each: what tells a reader whether an epoch of
            a number it knows is the one it knows.
    """

    epoch: Epoch
    run: str
    sequence: int
    log: EpochRuns = ()


class Tail(NamedTuple):
    """Where an instance's events on the stream end.

    Attributes:
        end: after the last message's last frame.
        acked: everything before it is on the stream without a hole, as that message's publisher knew from
            acknowledgements when it sent it. Between `acked` and `end` some may be missing: messages travel several at
            a time.
    """

    end: Position
    acked: Position


class StreamState(NamedTuple):
    """What a stream holds and how much it may.

    Attributes:
        first_sequence: one more than `last_sequence` when it is empty. last_sequence: 0 before the first message.
        max_bytes: -1 for no limit. max_messages: beyond them the oldest go; -1 for no limit. max_age_s: 0 for no limit.
        created: when its store was made; another one is another stream.
    """

    first_sequence: int
    last_sequence: int
    bytes: int
    max_bytes: int
    max_age_s: float
    created: str
    max_messages: int = -1


class UnreadableError(StreamError):
    """A message is not made of whole frames: another program writes there. A retry does not help."""


class AwayError(StreamError):
    """The stream does not answer, or has no leader, though the connection stands: it is right to ask again soon."""


class FrameLog(Protocol):
    """Where a publisher reads frames from: an instance's journal, on disk or in memory."""

    def read_after(self, position: Position, limit_bytes: int) -> list[FrameBytes]:
        """The frames from `position` on, in order, at least one if there is one, else up to `limit_bytes` together.

        A frame that contains `position` counts. Epochs follow each other: after the last frame of one comes the first
        of the next.
        """


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """One instance's sign of life, every second; soft state that routing needs. MessagePack on the wire.

    Attributes:
        published: offset up to which its events are on the stream.
        wall_time_ns: when it was sent.
        queued_tokens: prompt tokens that wait for their prefill.
        running_requests: requests being decoded.
        prefill_tokens_per_s, queue_tokens_per_s: as the instance has measured: what it computes of one prompt, and how
            quickly tokens that wait grow fewer; 0 where it has not.
        free_slots: slots that can be had without evicting, by tier.
        namespaces: those it has used last, 1024 at most, as are entries of everything else.
        told: what some of its namespaces are, each as `Namespace.canonical` has it, MAX_FIELDS_BYTES at most; a few at
            a time, in turn.
        run: of the process that sends it, as in `Fence`.
        trouble: what it cannot do now, such as "journal full: …"; "" when all is well.
        put_bytes: what this run has put in the object pool, by namespace: bytes in memory, and as they lie in the
            store. Of the few that it has used last, so that the sum also shrinks.
        put_total: the same of all namespaces together, which only grows; zeros from a kvbm that does not say it.
        applied: offset up to which it has decided events, published or not; 0 from a kvbm that does not say it.
        lends: where others can read its blocks, as `PeerAddress.words`; empty: nowhere.
        transfers: reads from others since the last one, or a sample of them.
        ages: by tier (HBM, HOST, NVME), what `core.ages` has counted since the process began; empty from a kvbm that
            does not say it.
        object_blocks: of one object of its object pool; 0: it has none, or is of a kvbm that does not say it.
        lent: what its process has lent; None: it lends nothing, or is of a kvbm that does not say it.
        chain: how its engine hashes tokens, as `core.chain_statement` has it; b"": it does not say.
    """

    instance: InstanceId
    cluster: str
    epoch: Epoch
    published: Offset
    wall_time_ns: int
    run: str = ""
    trouble: str = ""
    queued_tokens: int = 0
    running_requests: int = 0
    free_slots: dict[Tier, int] = {}
    namespaces: tuple[NamespaceId, ...] = ()
    stopping: bool = False
    put_bytes: Mapping[NamespaceId, tuple[int, int]] = {}
    applied: Offset = Offset(0)
    prefill_tokens_per_s: float = 0.0
    queue_tokens_per_s: float = 0.0
    lends: dict[str, str] = {}
    transfers: tuple[Transfer, ...] = ()
    told: tuple[bytes, ...] = ()
    put_total: tuple[int, int] = (0, 0)
    object_blocks: int = 0
    ages: tuple[TierAges, ...] = ()
    lent: LentCounts | None = None
    chain: bytes = b""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's word to an instance: what it says counts for nothing, and why. MessagePack on the wire.

    Attributes:
        run: whose heartbeats are ignored, as in `Fence`.
    """

    instance: InstanceId
    cluster: str
    run: str
    why: str


class AccessSample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt an engine asked for: what `kvbm-replay whatif` runs other policies on.

    May be lost. MessagePack on the wire.

    Attributes:
        hashes: packed, the prompt's full blocks from the first on.
        depth: blocks of it that were found.
        rate: share of prompts that are sampled; chosen by their first block, so that prompts which share it stay
            together.
    """

    instance: InstanceId
    cluster: str
    wall_time_ns: int
    namespace: NamespaceId
    hashes: bytes
    depth: int
    rate: float


class Load(NamedTuple):
    """What an engine tells of its queue, for the heartbeat."""

    queued_tokens: int = 0
    running_requests: int = 0
    prefill_tokens_per_s: float = 0.0
    queue_tokens_per_s: float = 0.0


class RoutesMessage(NamedTuple):
    """What a catalog tells the others of its routes, as it came: whoever may send it may send anything.

    Attributes:
        catalog: as the subject names it.
    """

    catalog: InstanceId
    data: bytes


class StreamMessage(NamedTuple):
    """One message as the stream keeps it.

    Attributes:
        sequence: its place in the stream of all instances, from 1; grows, with holes where a filter leaves others out.
        data: one or more whole frames of one epoch of one instance.
        stored_ns: when the server took it, by the server's clock; 0: not known.
        fence: of events: the fence that its publisher named, without a log; see `holders`. None: it named none.
    """

    sequence: int
    subject: str
    data: bytes
    stored_ns: int = 0
    fence: Fence | None = None


class Mark(NamedTuple):
    """A place in a stream that can be told from the same place of another history.

    A server that lost its end gives the lost sequences to other messages. Whoever keeps a sequence beyond the life of a
    connection keeps the fingerprint of the message there, and asks `still_holds` before it goes on behind it.

    Attributes:
        sequence: of the last message that was read, 0 before the first.
        fingerprint: 64 bits of that message; None when it is not known, as after `kvbm-replay rebuild`.
    """

    sequence: int
    fingerprint: int | None = None


START = Mark(0)


class EventReader(Protocol):
    """Reads a stream in order.

    What was fetched is never fetched again, except that a store is read anew from its first message when it was
    replaced, or has lost what was fetched.
    """

    @property
    def begun(self) -> int:
        """How often reading has begun: at first, and at each new connection.

        Between two the store may have lost its end.
        """

    @property
    def at_end(self) -> bool:
        """Whether all that was on the stream, as of the last word from it, has been fetched.

        It is a moment's truth: to know that everything before some moment was read, ask `last_sequence` after it.
        """

    @property
    def reached(self) -> int:
        """Everything up to this sequence was fetched, or is nothing the reader asked for, as far as is known."""

    async def fetch(self, timeout_s: float) -> list[StreamMessage]:
        """The next messages, at least one unless none came in time.

        Raises: StreamError: the stream could not be reached in time; a later call goes on where the last one ended.
        """

    async def close(self) -> None:
        """Give back what the reader holds. Idempotent."""


class PublisherOwner(Protocol):
    """What a publisher needs of the manager whose frames it carries.

    Called in the publisher's thread; nothing here may block.
    """

    @property
    def run(self) -> str:
        """Of this process: random, made at its start."""

    @property
    def epoch(self) -> Epoch:
        """The epoch its newest events belong to; it grows when the manager begins another in place."""

    def heartbeat(self, published: Position) -> Heartbeat:
        """The sign of life to send."""

    def on_published(self, position: Position) -> None:
        """The stream holds everything before this: the log may let go of what a completed snapshot has made
        truncatable.
        """

    def on_fenced(self, newer: Epoch) -> None:
        """The fence is another run's, of this epoch, and that one has been silent for three heartbeats: begin a later
        epoch.
        """

    def on_snapshot_asked(self) -> None:
        """A reader has missed events and asks for a snapshot."""

    def on_stream_state(self, state: StreamState) -> None:
        """What the stream holds and keeps, at each connection and then about once a minute: snapshots must come often
        enough.
        """

    def take_samples(self) -> list[AccessSample]:
        """Accesses since the last call, to send to whoever listens; none where nobody samples them."""

    def is_silent(self) -> bool:
        """Whether a sign of life would not be true now, as of an owner that speaks for an engine: none is sent then,
        but the last.
        """


class EventLog(Protocol):
    """The events of all instances, in the order in which they were stored, and the fences between them."""

    @property
    def max_message_bytes(self) -> int:
        """The largest message that `publish` can have stored, as of the last connection."""

    @property
    def most_in_flight(self) -> int:
        """Fenced messages of one instance that may be under way at a time, as of the last connection; 0: any number."""

    async def publish(
        self,
        cluster: str,
        instance: InstanceId,
        data: bytes,
        timeout_s: float = 5.0,
        fence: Fence | None = None,
        acked: Position = ORIGIN,
    ) -> int:
        """Store one message of whole frames; gives its sequence once the stream has it.

        Several may be under way. Messages go out in the order in which the calls are first run. An error leaves open
        whether it was stored, except for a refusal. A repeat is harmless to readers.

        Args:
            fence: the instance's, as far as the publisher knows. The server refuses when the fence message at the end
                has another sequence by now, and readers are told of all but the log. None: unfenced, for tools that are
                alone.
            acked: what `Tail.acked` will say: everything before it was acknowledged when this message was sent.
        Raises: FencedError: the fence is another one.
        """

    async def tail(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Tail | None:
        """Where the instance's events end; None when the stream holds none. Reads nothing of other instances.

        Raises: UnreadableError: the last message is not made of frames.
        """

    async def fence(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Fence | None:
        """The instance's last fence message; None when the stream holds none (any more)."""

    async def set_fence(
        self,
        cluster: str,
        instance: InstanceId,
        epoch: Epoch,
        run: str,
        expected: int,
        timeout_s: float = 5.0,
        epochs: EpochRuns = (),
    ) -> Fence:
        """Move the fence, if its sequence is still `expected` (0: there is none).

        Raises FencedError: it is another one.

        Args:
            epochs: what `Fence.log` will say.
        """

    async def state(self, timeout_s: float = 5.0) -> StreamState:
        """What the stream holds, and its limits."""

    async def first_sequence(self, timeout_s: float = 5.0) -> int:
        """The sequence of the oldest message kept; one more than `last_sequence` when there is none."""

    async def last_sequence(self, timeout_s: float = 5.0) -> int:
        """The sequence of the newest message, events or fence; 0 before the first."""

    async def message(self, sequence: int, timeout_s: float = 5.0) -> StreamMessage | None:
        """The message at a sequence, events or fence; None when the stream holds none there (any more, or yet)."""

    async def pull(
        self,
        after_sequence: int = 0,
        cluster: str | None = None,
        timeout_s: float = 5.0,
        fingerprint: int | None = None,
        parts: tuple[int, ...] = ALL_PARTS,
    ) -> EventReader:
        """A reader of all events and fence messages after a sequence, of one cluster or of all.

        Args:
            parts: only of instances in these, see `core.parts`; of one cluster.
            fingerprint: of the message at `after_sequence`, as in `Mark`: where another one has its place, the stream
                is read from its first message. None: not known, and the sequence is believed as long as the stream
                reaches it.
        """


class Heartbeats(Protocol):
    """The heartbeats of all instances: the last one of each is kept."""

    async def send_pulse(self, heartbeat: Heartbeat) -> None:
        """Replace the instance's last heartbeat. Not acknowledged: the next one follows soon."""

    async def last_pulse(self, cluster: str, instance: InstanceId, timeout_s: float = 5.0) -> Heartbeat | None:
        """The instance's last heartbeat that the stream has; None when there is none."""

    def watch_pulses(self, cluster: str | None = None, parts: tuple[int, ...] = ALL_PARTS) -> AsyncIterator[Heartbeat]:
        """The last heartbeat of every instance in some parts, then each new one; survives a lost connection, ends with
        `close`.
        """


class Broadcast(Protocol):
    """Asks, notices, samples and routes: they travel to whoever listens, and nobody keeps them."""

    async def ask_snapshot(self, cluster: str, instance: InstanceId, timeout_s: float = 1.0) -> bool:
        """Ask an instance to take a snapshot of what it holds.

        Whether it has heard: it answers at once and states when it may.
        """

    async def send_notice(self, notice: Notice) -> None:
        """Tell an instance. Not acknowledged, not kept."""

    def watch_snapshot_asks(self, cluster: str, instance: InstanceId) -> AsyncIterator[Notice | None]:
        """One item for each time somebody asks this instance for a snapshot (None; answers the asker), or tells it
        something.

        It ends with the connection and makes no new one: a publisher must learn what a new one finds before it goes on.
        """

    async def send_sample(self, sample: AccessSample) -> None:
        """Tell whoever listens. Not acknowledged, not kept."""

    def watch_samples(self, cluster: str | None = None) -> AsyncIterator[AccessSample]:
        """Each sample from now on; what a slow reader cannot take is lost."""

    async def send_routes(self, cluster: str, catalog: InstanceId, data: bytes) -> None:
        """Tell the catalogs of a cluster, this one as well. Not acknowledged, not kept."""

    def watch_routes(self, cluster: str) -> AsyncIterator[RoutesMessage]:
        """Each message of the cluster's catalogs from now on; of what a slow reader cannot take the oldest is lost."""


class CatalogAsk(NamedTuple):
    """A question to the catalog, as a message of the stream's server carries it.

    Attributes:
        caller, verb: as its subject names them.
        reply: where its answer goes.
        kind: type of its content, as HTTP has it.
        trace: its `traceparent`; "" for none.
    """

    caller: str
    verb: str
    reply: str
    kind: str
    body: bytes
    trace: str = ""


class AskLine(Protocol):
    """A connection for questions alone. One asyncio loop; a lost one never comes back."""

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as is known."""

    @property
    def max_answer_bytes(self) -> int:
        """The largest body of an answer."""

    async def listen(self, subjects: Collection[str]) -> None:
        """Take questions of these subjects, and of no others any more; catalogs that listen share them.

        Raises StreamError.
        """

    async def drain(self) -> None:
        """Take no more questions, but those that the server has sent."""

    async def answer(
        self, ask: CatalogAsk, status: int, kind: str, body: bytes, more: dict[str, str] | None = None
    ) -> None:
        """Answer a question. Raises StreamError: it cannot be sent.

        Args:
            status: of HTTP. kind: type of the body. more: headers.
        """

    def answer_now(self, ask: CatalogAsk, status: int, kind: str, body: bytes) -> None:
        """`answer` to a question that was given to `AskTaker.at_once`, from there: nothing is waited for.

        Raises StreamError.
        """

    async def close(self) -> None:
        """Idempotent."""


class AskTaker(Protocol):
    """Who answers questions."""

    def at_once(self, line: AskLine, ask: CatalogAsk) -> bool:
        """Answer a question that is short; False: nothing has happened, and `take` is to have it."""

    async def take(self, line: AskLine, ask: CatalogAsk) -> None:
        """Answer a question, or begin to."""


@runtime_checkable
class AskSource(Protocol):
    """What a stream may offer beside: a way for callers to ask the catalog."""

    @property
    def is_local(self) -> bool:
        """Whether its servers are all addressed on this machine's loopback."""

    async def open_asks(self, taker: AskTaker, timeout_s: float = 5.0) -> AskLine:
        """A line whose questions are given to `taker`, one after the other for each subject. Raises StreamError."""


class EventStream(EventLog, Heartbeats, Broadcast, Protocol):
    """One connection to all three. Methods belong to one asyncio loop.

    All raise StreamError, in time, when the stream does not answer or refuses, and ConfigError for an impossible name.
    """

    @property
    def is_connected(self) -> bool:
        """Whether the connection stands, as far as is known."""

    async def close(self) -> None:
        """End readers and watchers and free the connection. Idempotent."""


def mark_of(message: StreamMessage) -> Mark:
    """The place behind a message.

    The server's time is in it, so that a message that was sent again counts as another: what lies before it may be
    other messages too.
    """
    what = b"%d %d %s" % (message.stored_ns, zlib.crc32(message.data), message.subject.encode())
    return Mark(message.sequence, int.from_bytes(hashlib.blake2b(what, digest_size=8).digest(), "little"))


async def still_holds(events: EventLog, mark: Mark, timeout_s: float = 5.0) -> bool:
    """Whether a stream's history is still the one a mark was made in: all up to it may be taken as read.

    A message that has aged out, or that damage has hidden, has given its place to no other. What has no fingerprint is
    believed as long as the stream reaches it. Raises StreamError: the stream does not answer.
    """
    if not mark.sequence:
        return True
    message = None if mark.fingerprint is None else await events.message(mark.sequence, timeout_s)
    if message is not None:
        return mark_of(message) == mark
    return mark.sequence <= await events.last_sequence(timeout_s)


def checked_name(what: str, name: str) -> str:
    """The name, if it can be one part of a subject. Raises ConfigError.

    Args:
        what: the setting it comes from, such as "cluster".
    """
    if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable() or _BAD_IN_NAME.search(name):
        raise ConfigError(
            f"{what} {name!r} cannot be part of a stream's subject; use 1 to {MAX_NAME_BYTES} bytes without dots, "
            "spaces, '*' and '>'"
        )
    return name


def events_subject(cluster: str, instance: str) -> str:
    """Where an instance's events go. Raises ConfigError as `checked_name`."""
    return _parted_subject(EVENTS_PREFIX, cluster, instance)


def fence_subject(cluster: str, instance: str) -> str:
    """Where an instance's fence messages go. Raises ConfigError as `checked_name`."""
    return _parted_subject(FENCE_PREFIX, cluster, instance)


def pulse_subject(cluster: str, instance: str) -> str:
    """Where an instance's heartbeats go. Raises ConfigError as `checked_name`."""
    return _parted_subject(PULSE_PREFIX, cluster, instance)


def _parted_subject(prefix: str, cluster: str, instance: str) -> str:
    """An instance's subject among those of which a catalog may read some parts."""
    part = part_word(part_of(instance))
    return f"{prefix}.{checked_name('cluster', cluster)}.{part}.{checked_name('instance', instance)}"


def instance_subject(prefix: str, cluster: str, instance: str) -> str:
    """An instance's subject below a prefix. Raises ConfigError as `checked_name`."""
    return f"{prefix}.{checked_name('cluster', cluster)}.{checked_name('instance', instance)}"


def cluster_filter(prefix: str, cluster: str | None) -> str:
    """The subjects of one cluster, or of all. Raises ConfigError as `checked_name`."""
    return f"{prefix}.>" if cluster is None else f"{prefix}.{checked_name('cluster', cluster)}.>"


def subject_names(subject: str) -> tuple[str, InstanceId]:
    """Cluster and instance of a subject, with a part between them, or without."""
    names = subject.split(".", 3)[3].split(".")
    return names[0], InstanceId(names[-1])


class _FenceBody(msgspec.Struct, frozen=True):
    epoch: Epoch
    run: str
    log: EpochRuns = ()


def fence_data(epoch: Epoch, run: str, epochs: EpochRuns = ()) -> bytes:
    """What a fence message holds."""
    return msgspec.msgpack.encode(_FenceBody(epoch, run, epochs))


def is_fence(subject: str) -> bool:
    """Whether a message of the stream is a fence; else it is of events."""
    return subject.startswith(_FENCE_BEGINS)


def read_subjects(cluster: str | None, parts: tuple[int, ...] = ALL_PARTS) -> tuple[str, ...]:
    """The subjects of events and of fences, of one cluster or of all.

    Raises ConfigError as `checked_name`, and as `part_filters`.
    """
    return part_filters(EVENTS_PREFIX, cluster, parts) + part_filters(FENCE_PREFIX, cluster, parts)


def part_filters(prefix: str, cluster: str | None, parts: tuple[int, ...]) -> tuple[str, ...]:
    """The subjects of some parts of a cluster.

    Raises ConfigError as `checked_name`, and for parts of all clusters together.
    """
    if parts == ALL_PARTS:
        return (cluster_filter(prefix, cluster),)
    if cluster is None:
        raise ConfigError("some parts of all clusters together cannot be read; name the cluster, or read all parts")
    return tuple(f"{prefix}.{checked_name('cluster', cluster)}.{part_word(part)}.>" for part in parts)


def fence_of(data: bytes, sequence: int, what: str) -> Fence:
    """The fence a message sets. Raises UnreadableError: it is none.

    Args:
        what: the message, for the error.
    """
    try:
        body = msgspec.msgpack.decode(data, type=_FenceBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableError(f"{what} is not a fence ({error}); another program writes there") from None
    runs = ((body.epoch, body.run), *body.log)
    if len(runs) > _FENCE_EPOCHS or any(not 0 <= epoch < _MOST_EPOCH or len(run) > MOST_RUN for epoch, run in runs):
        raise UnreadableError(f"{what} is not a fence (it names what no fence does); another program writes there")
    return Fence(body.epoch, body.run, sequence, body.log)


def run_of(fence: Fence | None, epoch: Epoch) -> str:
    """The run that began an epoch, as a fence knows; "" when it does not."""
    if fence is None:
        return ""
    return fence.run if fence.epoch == epoch else dict(fence.log).get(epoch, "")


def is_other_life(epoch: Epoch, run: str, fence: Fence) -> bool:
    """Whether the epoch that was read last is not of the log whose events a fence lets follow.

    Args:
        epoch: 0 before the first. run: that began it; "" when nobody has told.
    """
    if not epoch or fence.run == run:
        return False
    began = run_of(fence, epoch)
    return epoch > fence.epoch or bool(run and began and run != began)


def end_of_message(data: bytes, instance: InstanceId, what: str) -> Position:
    """The position after a message's last frame.

    Raises UnreadableError: it is not made of whole frames, or not of this instance's.

    Args:
        what: the message, for the error.
    """
    at = 0
    try:
        while True:
            begin, header = at, decode_header(data, at)
            at += header.frame_bytes
            if at == len(data):
                frame, _ = decode_frame(data, begin)  # a header alone may say any epoch, and would be believed
                if frame.instance != instance:
                    raise UnreadableError(
                        f"{what} has a frame of instance {frame.instance}; another program writes there"
                    )
                return Position(header.epoch, header.next_offset)
            if at > len(data):
                raise UnreadableError(
                    f"{what} ends {at - len(data)} bytes before its last frame; another program writes there"
                )
    except FrameError as error:
        raise UnreadableError(f"{what} is not made of frames ({error}); another program writes there") from None
