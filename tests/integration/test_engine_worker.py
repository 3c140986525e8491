"""`kvbm engine` as a process of its own: it serves, reuses, survives bad commands, and comes back after kill -9."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm.demo.engine_process import EngineProcess
from tests.eventually import eventually

START_WAIT_S = 200.0  # it imports torch
ANSWER_WAIT_S = 120.0
BLOCK_TOKENS = 16
PROMPT = [token * 7 % 2048 for token in range(100)]
PROMPT_BLOCKS = len(PROMPT) // BLOCK_TOKENS


def start(folder: Path, name: str = "engine-a") -> EngineProcess:
    """A ready or starting engine on a folder, without a stream."""
    flags = {
        "instance.id": name,
        "instance.data_dir": folder / "data",
        "nats.enabled": "false",
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 48,
        "pools.host.slots": 64,
        "pools.nvme.slots": 96,
        "onboard.wait_s": ANSWER_WAIT_S,
    }
    return EngineProcess(name, flags, folder / "logs", {})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[EngineProcess]:
    process = start(tmp_path)
    try:
        yield process
    finally:
        process.stop()


def ready(process: EngineProcess) -> dict[str, Any]:
    """The first thing it says."""
    event = process.expect(START_WAIT_S, "did not start")
    assert event["event"] == "ready"
    return event


def submit(process: EngineProcess, request_id: str, tokens: list[Any], reuse: bool = True) -> dict[str, Any]:
    """Ask for 8 tokens and wait for them."""
    done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    process.submit(request_id, tokens, 8, reuse, done.put)
    return done.get(timeout=ANSWER_WAIT_S)


def settle(process: EngineProcess) -> None:
    """Wait until nothing leaves for a colder tier any more."""
    eventually(lambda: process.ask(op="settle")["settled"], "offloads do not end", ANSWER_WAIT_S)


def durable_status(process: EngineProcess) -> dict[str, Any]:
    """Its status once everything it has decided is in the journal."""
    status: dict[str, Any] = {}

    def is_durable() -> bool:
        status.update(process.ask(ANSWER_WAIT_S, op="status"))
        return bool(status["durable"] == status["applied"])

    eventually(is_durable, "the journal does not catch up", ANSWER_WAIT_S, state=lambda: status)
    return status


def test_it_answers_reuses_and_comes_back_after_kill_9_with_the_same_tokens(
    engine: EngineProcess, tmp_path: Path
) -> None:
    assert ready(engine)["epoch"] == 1
    first = submit(engine, "first", PROMPT)
    assert (first["failed"], len(first["tokens"]), first["hits"]) == (None, 8, {})
    again = submit(engine, "again", PROMPT)
    assert again["hits"] == {"HBM": PROMPT_BLOCKS}
    assert again["tokens"] == first["tokens"]
    settle(engine)
    assert engine.ask(op="clear")["evicted"] >= PROMPT_BLOCKS
    assert engine.ask(op="status")["held"]["HBM"] == 0
    warm = submit(engine, "warm", PROMPT)
    assert warm["hits"] == {"HOST": PROMPT_BLOCKS}
    assert warm["tokens"] == first["tokens"]
    cold = submit(engine, "cold", PROMPT, reuse=False)
    assert (cold["hits"], cold["tokens"]) == ({}, first["tokens"])
    settle(engine)
    status = durable_status(engine)
    assert status["held"]["NVME"] >= PROMPT_BLOCKS
    assert (status["corrupt_blocks"], status["failed_copies"]) == (0, 0)

    engine.kill()
    back = start(tmp_path)
    try:
        event = ready(back)
        assert event["epoch"] == 2
        assert event["recovered"] == {"HBM": 0, "HOST": 0, "NVME": status["held"]["NVME"]}
        recovered = submit(back, "recovered", PROMPT)
        assert recovered["hits"] == {"NVME": PROMPT_BLOCKS}
        assert recovered["tokens"] == first["tokens"]
        assert back.ask(op="status")["verified_reads"] >= PROMPT_BLOCKS
        assert back.ask(op="take_snapshot")["event"] == "done"
        assert back.ask(op="stop")["event"] == "stopped"
        assert back.process.wait(ANSWER_WAIT_S) == 0
    finally:
        back.stop()


def test_a_bad_command_is_answered_and_the_next_one_served(engine: EngineProcess) -> None:
    ready(engine)
    assert engine.process.stdin is not None
    for line, words in (
        (b"{nonsense", "one JSON object a line"),
        (b"[1, 2]", "one JSON object a line"),
        (b'"\xff\xfe"', "one JSON object a line"),
        (b'{"op": "fly"}', "there is no command 'fly'"),
        (b"{}", "lacks 'op'"),
        (b'{"op": "submit", "id": "r"}', "lacks 'tokens'"),
        (b'{"op": "submit", "id": "r", "tokens": ["a"], "max_new_tokens": 1}', "cannot be used"),
        (b'{"op": "submit", "id": "r", "tokens": 5, "max_new_tokens": 1}', "cannot be used"),
        (b'{"op": "settle", "timeout_s": "soon"}', "cannot be used"),
    ):
        engine.process.stdin.write(line + b"\n\n")
        engine.process.stdin.flush()
        event = engine.events.get(timeout=ANSWER_WAIT_S)
        assert event["event"] == "error", (line, event)
        assert words in event["message"], (line, event)
    for tokens, words in (([], "empty-prompt"), ([5000], "unknown-token"), ([1] * 5000, "too-long")):
        assert words in submit(engine, "refused", tokens)["failed"]
    assert submit(engine, "served", PROMPT)["failed"] is None
    assert engine.ask(op="status")["created_blocks"] >= PROMPT_BLOCKS
    assert engine.alive()
