"""Which pyverbs fits and which devices there are, from folders that a test makes: no device, no library."""

from __future__ import annotations

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from kvbm.core.errors import VerbsError
from kvbm.doctor.finding import Result
from kvbm.doctor.rdma import RdmaFacts, judge_rdma
from kvbm.verbs.library import find_pyverbs, load_pyverbs
from kvbm.verbs.ports import Port, ports


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pyverbs", raising=False)
    monkeypatch.setattr("kvbm.verbs.library._of_environment", lambda: None)


def debian(folder: Path, suffix: str) -> Path:
    (folder / "pyverbs").mkdir()
    (folder / "pyverbs" / "__init__.py").touch()
    (folder / "pyverbs" / f"device{suffix}").touch()
    return folder


def test_debians_fits_a_python_of_its_own_version(tmp_path: Path) -> None:
    fit = find_pyverbs(debian(tmp_path, EXTENSION_SUFFIXES[0]))
    assert (fit.where, fit.origin, fit.why_not) == (tmp_path / "pyverbs", "Debian", "")


def test_debians_for_another_python_does_not_fit_and_says_for_which_it_is(tmp_path: Path) -> None:
    fit = find_pyverbs(debian(tmp_path, ".cpython-27-x86_64-linux-gnu.so"))
    assert fit.where is None and "cpython-27" in fit.why_not


def test_the_environments_comes_before_debians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").mkdir()
    ours = debian(tmp_path / "ours", EXTENSION_SUFFIXES[0]) / "pyverbs"
    monkeypatch.setattr("kvbm.verbs.library._of_environment", lambda: ours)
    fit = find_pyverbs(debian(tmp_path, EXTENSION_SUFFIXES[0]))
    assert (fit.where, fit.origin) == (ours, "environment")


def test_without_pyverbs_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(VerbsError, match="RDMA needs pyverbs: it is not installed; apt-get install python3-pyverbs"):
        load_pyverbs(tmp_path)


def test_a_pyverbs_that_cannot_be_loaded_is_named_with_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)  # another test of this process may have loaded a good one
    with pytest.raises(VerbsError, match="cannot be loaded"):
        load_pyverbs(debian(tmp_path, EXTENSION_SUFFIXES[0]))
    sys.modules.pop("pyverbs", None)


def test_devices_are_told_with_state_and_link(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    assert ports(tmp_path) == [Port("mlx5_0", 1, "ACTIVE", "Ethernet")]
    assert ports(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("facts", "result"),
    [
        (RdmaFacts([Port("rxe0", 1, "ACTIVE", "Ethernet")], "pyverbs of Debian (/x)", ""), Result.OK),
        (RdmaFacts([Port("rxe0", 1, "DOWN", "Ethernet")], "pyverbs of Debian (/x)", ""), Result.UNUSED),
        (RdmaFacts([Port("rxe0", 1, "ACTIVE", "Ethernet")], "", "RDMA needs pyverbs"), Result.UNUSED),
        (RdmaFacts([], "", "RDMA needs pyverbs"), Result.UNUSED),
    ],
)
def test_the_doctor_has_one_line_and_no_complaint(facts: RdmaFacts, result: Result) -> None:
    found = judge_rdma(facts)
    assert found.result is result and found.found and "\n" not in found.found
