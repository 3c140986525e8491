"""What `kvbm doctor` says of NIXL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from kvbm.core.errors import NixlError
from kvbm.doctor import nixl
from kvbm.doctor.deadline import PROBE_S
from kvbm.doctor.finding import Result
from kvbm.doctor.nixl import judge_nixl, look_at_nixl
from kvbm.transport import nixl_process
from kvbm.transport.nixl_agent import NixlProcess


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no NIXL that hangs."""
    monkeypatch.setattr(nixl, "_TRY_S", 120.0)


@pytest.mark.usefixtures("patient")
def test_where_it_is_and_works_its_version_is_told() -> None:
    found = judge_nixl(facts := look_at_nixl())
    assert facts.package.startswith("nixl")
    assert (found.result, found.found) == (Result.OK, f"{facts.package}, with UCX"), facts


def test_where_it_is_not_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_process, "PACKAGES", ("nixl_of_nowhere",))
    found = judge_nixl(look_at_nixl())
    assert found.result is Result.UNUSED and "pip install 'kvbm-ledger[nixl]'" in found.found


@pytest.mark.usefixtures("patient")
def test_where_it_cannot_be_used_the_reason_is_told() -> None:
    facts = look_at_nixl(NixlProcess({"UCX_TLS": "none_such"}))
    found = judge_nixl(facts)
    assert found.result is Result.WARNING and "NIXL cannot be used" in found.found


def test_a_quick_look_does_not_try_it() -> None:
    assert judge_nixl(look_at_nixl(is_tried=False)).found == f"{look_at_nixl(is_tried=False).package}, not tried"


def test_where_it_is_slow_that_is_a_warning_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    until_s: list[float] = []
    monkeypatch.setattr(nixl, "time", SimpleNamespace(monotonic=lambda: 1000.0))

    class Slow(NixlProcess):
        def lend(self, *words: Any) -> NoReturn:
            until_s.append(words[-1])
            raise NixlError("no answer in time")

    assert judge_nixl(look_at_nixl(Slow())).result is Result.WARNING
    assert 1000.0 < until_s[0] < 1000.0 + PROBE_S, "the doctor itself gives up before, and takes it for a problem"
