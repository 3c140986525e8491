"""Children that die."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from kvbm.workload.processes import Child, EngineProcess


def test_a_request_to_an_engine_that_has_died_is_answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Process:
        stdin = io.BytesIO()
        stdout = io.BytesIO()

    monkeypatch.setattr(Child, "__init__", lambda self, *_, **__: setattr(self, "process", Process()))
    engine = EngineProcess("e", {}, tmp_path, {})
    assert engine.events.get(timeout=60) == {"event": "died"}
    told: list[dict[str, Any]] = []
    engine.submit("r", [1], 1, True, told.append)
    assert [answer["failed"] for answer in told] == ["engine died"]
