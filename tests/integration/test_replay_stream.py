"""`kvbm-replay` on the live stream of a real nats-server."""

# ruff: noqa: F811 - fixtures are imported

from __future__ import annotations

import socket

import pytest

from tests.captures import make_capture
from tests.nats_fixture import (
    fresh_nats,  # noqa: F401
    messages,
    publish,
)
from tests.readable import main

ONE = make_capture(7, commands=120).frames()
TWO = make_capture(8, instance="two").frames()


def test_the_stream_is_read_to_its_end_with_repeats_and_several_frames_a_message(
    fresh_nats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ones = messages(ONE)
    lost = next(n for n in range(2, len(ONE)) if ONE[n].epoch == ONE[n + 1].epoch)
    publish(fresh_nats, messages(TWO, per_message=3))
    publish(fresh_nats, [*ones[:lost], ones[lost + 1], *ones[lost:]])
    assert main(["verify", fresh_nats]) == 0
    out = capsys.readouterr().out
    events = sum(len(frame.events) for frame in ONE + TWO)
    assert out.startswith("verified: 2 instances, ")
    assert f", {len(ONE) + len(TWO):,} frames, {events:,} events, 1 repeat, 0 findings" in out
    assert main(["state", fresh_nats, "--instance", "one"]) == 0
    assert f"digest {ONE[-1].digest:016x}" in capsys.readouterr().out
    assert main(["cat", fresh_nats, "--instance", "two", "--limit", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_finding_names_the_stream_sequence_and_a_late_beginning_is_none(
    fresh_nats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = messages([frame for frame in ONE if frame.epoch == ONE[-1].epoch])[1:]
    damaged = bytearray(sent[3][1])
    damaged[60] ^= 1
    sequences = publish(fresh_nats, [*sent[:3], (sent[3][0], bytes(damaged)), *sent[4:]])
    assert main(["verify", fresh_nats]) == 1
    note, verdict, sentence = capsys.readouterr().out.splitlines()
    assert "nothing is known before" in note
    assert verdict.startswith("FAILED: 1 finding in 1 instance, 1 epoch, ")
    assert f"corrupt-frame at stream sequence {sequences[3]} byte 0, instance one epoch {ONE[-1].epoch} " in sentence


def test_two_clusters_may_have_an_instance_of_one_name(fresh_nats: str, capsys: pytest.CaptureFixture[str]) -> None:
    publish(fresh_nats, messages(ONE), "c")
    publish(fresh_nats, messages(make_capture(9).frames()), "d")
    assert main(["verify", fresh_nats]) == 0
    assert "verified: 2 instances, " in capsys.readouterr().out


def test_an_empty_stream_and_an_absent_server_are_said_in_time(
    fresh_nats: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", fresh_nats]) == 2
    assert "holds no events" in capsys.readouterr().err
    with socket.socket() as nobody:  # bound, and nobody listens
        nobody.bind(("127.0.0.1", 0))
        assert main(["verify", f"nats://127.0.0.1:{nobody.getsockname()[1]}", "--timeout", "1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
