"""Processes beside a catalog that keep and answer the past: how they begin and end, and what is said of it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.degraded import Degraded
from kvbm.catalog.history import readers
from kvbm.catalog.history.keeper import HistoryKeeper
from kvbm.catalog.history.past import HistoryOptions, PastAnswers, whole
from kvbm.config.settings import LimitSettings
from tests.eventually import WAIT_S, eventually_async

REPORTS = """
import sys, time
from kvbm.catalog.history.wire import REPORT, packed
if len(sys.argv) > 1:
    sys.stdout.buffer.write(packed(REPORT, sys.argv[1].encode()))
    sys.stdout.flush()
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
sys.stdin.read()
"""
ANSWERS = """
import os, sys
from kvbm.catalog.history.wire import ASK, BODY, END, HEAD, PREFIX, packed
while prefix := sys.stdin.buffer.read(PREFIX.size):
    size, kind = PREFIX.unpack(prefix)
    sys.stdin.buffer.read(size - 1)
    if kind == ASK:
        answer = packed(HEAD, b"{}") + packed(BODY, str(os.getpid()).encode()) + packed(END, b"")
        sys.stdout.buffer.write(answer)
        sys.stdout.flush()
"""


GATED = f"""
import os, sys, time
with open(sys.argv[1] + ".begun", "a") as file:
    file.write(f"{{os.getpid()}}\\n")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
{ANSWERS}
"""


def keeper_of(folder: Path, *arguments: str) -> HistoryKeeper:
    return HistoryKeeper((sys.executable, "-c", REPORTS, *arguments), folder, Degraded())


def test_the_last_words_of_a_keeper_that_ends_stay(tmp_path: Path):
    assert asyncio.run(keeper_of(tmp_path, '{"trouble": "no room"}', "3")._follow()) == "no room"
    assert "has ended" in asyncio.run(keeper_of(tmp_path, "{}", "3")._follow())


def test_a_keeper_is_asked_to_look_again_once_its_first_look_has_ended(tmp_path: Path):
    async def is_asked(*reports: str) -> bool:
        keeper = keeper_of(tmp_path, *reports)
        following = asyncio.create_task(keeper._follow())
        await eventually_async(lambda: keeper._process is not None, "it has started")
        await eventually_async(lambda: not reports or keeper.read_s > 0, "it has looked")
        keeper.look_again()
        is_asked = keeper._is_ended
        if is_asked:
            async with asyncio.timeout(WAIT_S):
                assert await following == ""  # no trouble
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return is_asked

    assert asyncio.run(is_asked('{"read_s": 1.0}'))
    assert not asyncio.run(is_asked())  # it may be making all of it anew


def test_an_erasure_ends_a_keeper_that_was_only_starting(tmp_path: Path):
    for name in ("history.json", ".history.json.7.ab", "data-x/stays", "lost+found"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    async def erased() -> None:
        keeper = keeper_of(tmp_path, "{}")
        running = asyncio.create_task(keeper.run())
        await asyncio.sleep(0)
        assert keeper._alone.locked() and keeper._process is None
        async with asyncio.timeout(WAIT_S):
            await keeper.erase()
        assert keeper.trouble == ""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(erased())
    assert [path.name for path in tmp_path.iterdir()] == ["lost+found"]


def test_a_reader_whose_asker_left_while_it_started_answers_the_next_and_a_dead_one_nobody(tmp_path: Path):
    options = HistoryOptions(folder=str(tmp_path), keeper=(), reader=(sys.executable, "-c", ANSWERS))
    limits = LimitSettings(history_processes=1, history_s=WAIT_S)

    async def asked() -> None:
        past = PastAnswers(options, limits, Degraded())

        async def answer() -> int:
            async with past.ask("which", {}, WAIT_S) as reply:
                return int(await whole(reply.body))

        leaves = asyncio.create_task(answer())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        (starting,) = past._readers._ending  # it is still counted
        first = await answer()
        assert starting.done() and await answer() == first
        os.kill(first, signal.SIGKILL)
        await eventually_async(lambda: past._readers._idle and not past._readers._idle[0].is_alive, "it is dead")
        assert await answer() != first
        await past.close()

    asyncio.run(asked())


def test_a_reader_that_is_still_starting_is_waited_for_and_no_question_is_called_slow_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate, begun = tmp_path / "gate", tmp_path / "gate.begun"
    options = HistoryOptions(folder=str(tmp_path), keeper=(), reader=(sys.executable, "-c", GATED, str(gate)))
    limits = LimitSettings(history_processes=1, history_s=WAIT_S)
    monkeypatch.setattr(readers, "_LEAVE_S", 0.0)  # of one that has started
    monkeypatch.setattr(readers, "_GRACE_S", 0.0)
    monkeypatch.setattr(readers, "WAIT_S", WAIT_S)

    async def asked() -> None:
        past = PastAnswers(options, limits, Degraded())

        async def answer(within_s: float) -> int:
            async with past.ask("which", {}, within_s) as reply:
                return int(await whole(reply.body))

        monkeypatch.setattr(readers, "_START_S", 0.1)
        with pytest.raises(ApiError) as refused:
            await answer(0.01)
        assert refused.value.status == 429 and "still starting" in str(refused.value)
        await past.close()

        monkeypatch.setattr(readers, "_START_S", WAIT_S)
        past = PastAnswers(options, limits, Degraded())
        begun.unlink(missing_ok=True)
        leaves = asyncio.create_task(answer(WAIT_S))
        await eventually_async(lambda: begun.exists() and begun.read_text().endswith("\n"), "no process has begun")
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        following = asyncio.create_task(answer(WAIT_S))
        await asyncio.sleep(0)
        gate.touch()
        async with asyncio.timeout(WAIT_S):
            assert [await following] == [int(one) for one in begun.read_text().split()]  # it was not ended
        await past.close()

    asyncio.run(asked())
