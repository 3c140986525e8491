"""Heartbeats as a catalog hears them: damaged ones, and ones it has heard before."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import msgspec
import pytest

from kvbm.catalog.degraded import Degraded
from kvbm.catalog.follow import heartbeats as heartbeats_of
from kvbm.catalog.follow.heartbeats import HeartbeatFollower
from kvbm.catalog.follow.lag import StreamLag
from kvbm.catalog.members.liveness import LIVENESS_S, HeartbeatReceived, LifeState, LivenessTicked, OwnPulse
from kvbm.core.ages import TierAges
from kvbm.core.fetching import Transfer
from kvbm.core.ids import (
    MAX_FIELDS_BYTES,
    MAX_NAME_BYTES,
    MAX_TEXT_BYTES,
    Epoch,
    InstanceId,
    Namespace,
    NamespaceId,
    Offset,
)
from kvbm.core.lent import LentCounts
from kvbm.streams.base import EventReader, EventStream, Heartbeat, StreamMessage
from kvbm.streams.nats.heartbeats import heartbeat_in
from kvbm.streams.pulse_words import encoded_heartbeat
from tests.indexes import NATIVE

ONE = InstanceId("one")


def heartbeat(wall_time_ns: int = 1, instance: InstanceId = ONE) -> Heartbeat:
    return Heartbeat(instance=instance, cluster="c", epoch=Epoch(1), published=Offset(1), wall_time_ns=wall_time_ns)


@pytest.mark.parametrize("kind", ["utf-8", "depth", "name"])
def test_a_damaged_pulse_is_refused_and_not_fatal(kind: str) -> None:
    data = msgspec.msgpack.encode(heartbeat())
    if kind == "utf-8":
        data = data.replace(b"\xa3one", b"\xa3\xff\xfe\xfd")
    elif kind == "depth":
        data = bytes([data[0] + 1]) + data[1:] + b"\xa1z" + b"\x91" * 100_000 + b"\xc0"
    else:
        data = msgspec.msgpack.encode(heartbeat(instance=InstanceId("two")))
    assert heartbeat_in(StreamMessage(1, "kvbm.v1.pulse.c.one", data)) is None


@pytest.mark.parametrize(
    "much",
    [
        {"instance": "i" * 256},
        {"cluster": "c" * 256},
        {"run": "r" * 129},
        {"lends": {"tcp": "x" * 8193}},
        {"lends": {"x" * 8193: ""}},
        {"lends": dict.fromkeys(map(str, range(1025)), "")},
        {"namespaces": (NamespaceId(bytes(16)),) * 1025},
        {"transfers": (Transfer(),) * 1025},
        {"transfers": (Transfer("t" * 256),)},
        {"put_bytes": {NamespaceId(b"%016d" % at): (1, 1) for at in range(1025)}},
        {"told": (b"",) * 1025},
        {"told": (b"{}", bytes(MAX_FIELDS_BYTES + 1))},
        {"instance": "\U0001f642" * 64},
        {"cluster": "\U0001f642" * 64},
        {"run": "\U0001f642" * 33},
        {"ages": (TierAges(),) * 1025},
        {"ages": (TierAges(wanted=(0,) * 1025),)},
        {"epoch": -1},
        {"published": 1 << 63},
        {"applied": -1},
        {"wall_time_ns": 1 << 63},
    ],
)
def test_a_pulse_that_has_more_of_something_than_it_may_is_refused(much: dict[str, Any]) -> None:
    said = msgspec.structs.replace(heartbeat(), **much)
    subject = f"kvbm.v1.pulse.{said.cluster}.{said.instance}"
    assert heartbeat_in(StreamMessage(1, subject, msgspec.msgpack.encode(said))) is None
    assert encoded_heartbeat(said)[1]


@pytest.mark.parametrize("said", [None, [], [3, 5], [3, 5, *[0] * 30]], ids=["nothing", "no count", "older", "newer"])
def test_a_pulse_of_another_kvbm_says_what_was_lent_as_far_as_it_knows(said: list[int] | None) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(heartbeat())) | {"lent": said}
    read = heartbeat_in(StreamMessage(1, "kvbm.v1.pulse.c.one", msgspec.msgpack.encode(fields)))
    assert read is not None
    assert read.lent == (None if said is None else LentCounts(*said[:2]))


def test_a_pulse_tells_of_a_namespace_whose_texts_are_all_at_their_longest() -> None:
    names = ("model", "revision", "kv_dtype", "layout", "ranks", "lora", "scheme")
    texts: dict[str, Any] = dict.fromkeys(names, "ä" * (MAX_TEXT_BYTES // 2))
    space = Namespace(block_tokens=16, tenant="t" * MAX_NAME_BYTES, **texts)
    said = msgspec.structs.replace(heartbeat(), told=(space.canonical(),))
    assert encoded_heartbeat(said)[1] == ""


def test_of_a_long_trouble_the_beginning_is_kept() -> None:
    said = msgspec.structs.replace(heartbeat(), trouble="ä" * 100_000)
    heard = heartbeat_in(StreamMessage(1, "kvbm.v1.pulse.c.one", msgspec.msgpack.encode(said)))
    assert heard is not None and heard.trouble == "ä" * 2048 + "…"


def test_a_pulse_that_is_delivered_again_brings_nobody_back_to_life() -> None:
    class Repeating:
        async def watch_pulses(self, cluster: str | None = None, parts: tuple[int, ...] = ()) -> Any:
            yield said
            yield said  # a reader that begins anew gets the last pulse of everyone again

    said = heartbeat(time.time_ns())
    stream, sequencer = cast(EventStream, Repeating()), NATIVE.sequencer()
    lag = StreamLag(stream, cast(EventReader, None), sequencer, 0)
    heartbeats = HeartbeatFollower(stream, sequencer, Degraded(), None, LIVENESS_S, lag)
    heartbeats.step(OwnPulse())
    asyncio.run(heartbeats.watch())
    liveness = heartbeats.liveness
    last = liveness.last(ONE)
    assert last is not None and liveness.state(ONE) is LifeState.LIVE
    for second in range(1, 6):
        liveness.step(last.at_s + second, OwnPulse())
        liveness.step(last.at_s + second, HeartbeatReceived(said))
    liveness.step(last.at_s + 5, LivenessTicked())
    assert liveness.state(ONE) is LifeState.SILENT


def test_of_more_forgotten_instances_than_it_keeps_the_first_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats_of, "_MOST_OLD_PULSES", 3)
    stream, sequencer = cast(EventStream, None), NATIVE.sequencer()
    lag = StreamLag(stream, cast(EventReader, None), sequencer, 0)
    heartbeats = HeartbeatFollower(stream, sequencer, Degraded(), None, LIVENESS_S, lag)
    names = [InstanceId(f"i-{number}") for number in range(5)]
    for number, name in enumerate([*names, names[3]], 1):
        heartbeats.forget(name, number)
    for number, name in enumerate(names[:5], 1):
        heartbeats.on_heartbeat(heartbeat(6 if name == names[3] else number, name))
    heard = [name for name in names if heartbeats.liveness.last(name) is not None]
    assert heard == names[:2]  # the others' last pulses are no sign of life
