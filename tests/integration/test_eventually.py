"""The helper with which tests wait."""

from __future__ import annotations

import asyncio

import pytest

from tests.eventually import eventually, eventually_async


def test_it_gives_the_first_true_answer() -> None:
    answers = [0, "", "there"]
    assert eventually(lambda: answers.pop(0)) == "there"
    assert answers == []


def test_a_failure_says_what_was_awaited_and_the_last_state() -> None:
    found: list[int] = []
    with pytest.raises(
        AssertionError, match=r"nobody comes within 0 s \(.*test_eventually.py:\d+\); last answer: \[\]; state: 7"
    ):
        eventually(lambda: found, "nobody comes", 0, state=lambda: 7)


def test_in_an_event_loop_the_others_go_on_and_a_check_may_be_a_coroutine() -> None:
    async def work() -> None:
        done = asyncio.Event()

        async def is_done() -> bool:
            return done.is_set()

        asyncio.get_running_loop().call_soon(done.set)
        assert await eventually_async(is_done, "nothing else runs")
        assert await eventually_async(done.is_set)
        with pytest.raises(AssertionError, match="last answer: False"):
            await eventually_async(lambda: False, timeout_s=0)

    asyncio.run(work())
