"""What a publisher logs, each thing once per change, and what it says of its trouble."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

from kvbm.core.ids import Epoch, InstanceId
from kvbm.safe_log import SafeLog
from kvbm.streams.base import Position
from kvbm.streams.publisher.machine import SILENT_HEARTBEATS
from kvbm.streams.publisher.messages import Acked, Disconnected, FenceSet, Input, Refused, ReportFenced

log = SafeLog()

STALLED_S = 5.0  # after this long without progress it is logged what is waited for
OWNER_WARNING_S = 60.0  # a call of the owner that fails again is logged again after this time

# What a bug may be in.
CONNECTING, FENCING, SENDING, RUNNING = "connecting", "setting the fence", "sending", "the publisher"


class PublisherReports:
    """The publisher's log lines and its trouble in words. In its thread, but `trouble`: any thread."""

    def __init__(self, server: str, cluster: str, instance: InstanceId) -> None:
        self._server = server
        self._cluster = cluster
        self._instance = instance
        self._stall = ""
        self._heartbeat = ""
        self._is_unreadable = False
        self._refused_pulse = ""
        self._place = ""
        self._bugs: dict[str, str] = {}  # what fails with one now → which
        self._bugs_logged: set[tuple[str, str, int]] = set()
        self._progress_s = time.monotonic()  # when something was stored last, or nothing was waiting
        self._progress_acks = 0
        self._stalls: set[str] = set()  # what was logged of the stall that lasts
        self._why = ""
        self._last_logged = ""
        self._warned: set[str] = set()
        self._owner_warned_s: dict[str, float] = {}

    @property
    def trouble(self) -> str:
        """What the stream does not take for a while now, and why nobody gets or reads the heartbeats;

        "" when all is well.
        """
        bugs = [f"stream: {what} fails with a bug ({which}), and is tried again" for what, which in self._bugs.items()]
        return "; ".join(filter(None, (*bugs, self._stall, self._heartbeat, self._refused_pulse)))

    @property
    def place(self) -> str:
        """Which other process has the instance's place on the stream; "" while none has."""
        return self._place

    def take(self, happened: Input, published: Position) -> None:
        """Log what an input shows of the connection, if that is new."""
        match happened:
            case FenceSet():
                if self._bugs:
                    self._bugs = {what: which for what, which in self._bugs.items() if what == SENDING}
                if self._last_logged != "publisher.refused":
                    self.connection("publisher.connected", "", published)
            case Acked():
                if self._bugs:
                    self._bugs = {}
                if self._last_logged == "publisher.refused":
                    self.connection("publisher.connected", "", published)
            case Disconnected(reason, stands):
                self._why = reason
                if not stands:
                    self.connection("publisher.disconnected", reason, published)
            case Refused(_, reason, away):
                self._why = reason
                if not away:
                    self.connection("publisher.refused", reason, published)

    def connection(self, what: str, why: str, published: Position) -> None:
        """Log a state of the connection, unless it was the last one."""
        if what == self._last_logged:
            return
        self._last_logged = what
        if why:
            log.warning(what, server=self._server, instance=self._instance, why=why)
        else:
            log.info(what, server=self._server, instance=self._instance, epoch=published.epoch, offset=published.offset)

    def fenced(self, other: ReportFenced, epoch: Epoch) -> None:
        """Another run owns the instance."""
        self._last_logged = ""
        self._place = f"place: run {other.run} has this instance's place on the stream, in epoch {other.epoch}"
        log.error(
            "instance.fenced",
            server=self._server,
            cluster=self._cluster,
            instance=self._instance,
            epoch=epoch,
            other_epoch=other.epoch,
            other_run=other.run,
            why="another process has this instance's place on the stream; nothing is published from here",
            remedy=f"stop one of the two, or give one another instance.id; once the other has been silent for "
            f"{SILENT_HEARTBEATS} heartbeats, this one begins a later epoch",
        )

    def is_owned(self) -> None:
        """No other run owns the instance now, as far as this one knows."""
        self._place = ""

    def took_over(self, other_epoch: Epoch) -> None:
        """The other run is silent."""
        log.info("instance.place_free", instance=self._instance, other_epoch=other_epoch)

    def heartbeat(self, unreadable: str, failure: str) -> None:
        """Log, once for as long as it lasts, that no reader can read the heartbeats: the catalog would only see
        silence.

        Args:
            unreadable: why not; "" when it can be read.
            failure: what to say of a heartbeat that the owner could not make, else "".
        """
        is_new = bool(unreadable) and not self._is_unreadable
        self._is_unreadable = bool(unreadable)
        if unreadable:
            self._heartbeat = (
                f"heartbeat: it cannot be read ({unreadable}); the catalog leaves this instance out of "
                "answers until it can"
            )
        else:
            self._heartbeat = failure
        if is_new:
            log.warning(
                "heartbeat.unreadable",
                server=self._server,
                instance=self._instance,
                why=unreadable,
                remedy="the catalog leaves this instance out of answers; correct what the engine reports, or report "
                "the bug",
            )

    def pulse_refused(self, why: str) -> None:
        """The stream does not take the heartbeats, on a connection that stands; "": it has taken one."""
        if why and not self._refused_pulse:
            log.warning(
                "publisher.pulse_refused",
                server=self._server,
                instance=self._instance,
                why=why,
                remedy="the catalog leaves this instance out of answers until one is taken",
            )
        self._refused_pulse = (
            f"heartbeat: the stream refuses it ({why}); the catalog leaves this instance out of answers" if why else ""
        )

    def progress(
        self, now_s: float, confirmed: Position, acks: int, waits_for: str, has_all: Callable[[], bool]
    ) -> None:
        """Log what is waited for, once for each thing, when nothing was stored for a while though there is something to
        store.

        Args:
            acks: messages stored so far.
            waits_for: see `Publisher.waits_for`.
        """
        if acks != self._progress_acks or has_all():
            self._progress_acks, self._progress_s = acks, now_s
            if self._stalls:
                log.info(
                    "publisher.goes_on",
                    server=self._server,
                    instance=self._instance,
                    epoch=confirmed.epoch,
                    offset=confirmed.offset,
                )
            self._stalls.clear()
            self._stall = ""
            return
        waited_s = now_s - self._progress_s
        if waited_s < STALLED_S:
            return
        waits_for = waits_for or "its turn"
        self._stall = (
            f"stream: it waits for {waits_for}; nothing is published after offset {confirmed.offset} of epoch "
            f"{confirmed.epoch}{f' ({self._why})' if self._why else ''}"
        )
        if waits_for not in self._stalls:
            self._stalls.add(waits_for)
            log.warning(
                "publisher.stalled",
                server=self._server,
                instance=self._instance,
                waits_for=waits_for,
                waited_s=round(waited_s, 1),
                epoch=confirmed.epoch,
                offset=confirmed.offset,
                why=self._why,
                remedy="look whether the server's disk is full, and whether its cluster has a leader of stream KVBM",
            )

    def bug(self, event: str, what: str, error: Exception) -> str:
        """A bug in the sending path: its traceback is logged once, and it is `trouble` until `what` succeeds.

        Gives it in words.

        Args:
            event: name of the log line.
            what: CONNECTING, FENCING, SENDING or RUNNING.
        """
        which = self.fault(event, error)
        self._bugs = self._bugs | {what: which}
        return which

    def fault(self, event: str, error: BaseException) -> str:
        """What nobody has foreseen: its traceback is logged once. Gives it in words."""
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = (type(error).__name__, last.filename, last.lineno or 0)
        if place not in self._bugs_logged:
            self._bugs_logged.add(place)
            log.error(event, server=self._server, instance=self._instance, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def owner_failed(self, call: str, why: str) -> None:
        """A call of the owner has raised."""
        now_s = time.monotonic()
        if now_s - self._owner_warned_s.get(call, float("-inf")) >= OWNER_WARNING_S:
            self._owner_warned_s[call] = now_s
            log.warning(f"publisher.owner_failed.{call}", server=self._server, instance=self._instance, why=why)

    def warn_once(self, what: str, **fields: object) -> None:
        """Log a warning, if it is the first of its name."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning(what, server=self._server, instance=self._instance, **fields)
