"""`tools/wheels.py`: which Python and which wheel it takes. What it builds and tries is `make wheels-check`."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tools import wheels

HERE = sys.version_info[:2]


@pytest.fixture
def no_other_pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH and a folder of Pythons with nothing in them."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nowhere" / "python"))
    (tmp_path / "bin").mkdir()
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_wheel_for_a_python_is_its_own_below_3_12_and_abi3_from_there_on(tmp_path: Path) -> None:
    for tag in ("cp311-cp311", "cp312-abi3"):
        (tmp_path / f"kvbm_ledger-0.1.0-{tag}-manylinux_2_34_x86_64.whl").touch()
    assert "-cp311-cp311-" in wheels.wheel_of(tmp_path, (3, 11)).name
    assert "-cp312-abi3-" in wheels.wheel_of(tmp_path, (3, 12)).name
    assert wheels.wheel_of(tmp_path, (3, 13)) == wheels.wheel_of(tmp_path, (3, 12))


def test_no_wheel_and_two_of_them_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(wheels.WheelsError, match=r"no wheel for Python 3\.12.*make wheels"):
        wheels.wheel_of(tmp_path, (3, 12))
    for version in ("0.1.0", "0.2.0"):
        (tmp_path / f"kvbm_ledger-{version}-cp312-abi3-manylinux_2_34_x86_64.whl").touch()
    with pytest.raises(wheels.WheelsError, match="2 wheels"):
        wheels.wheel_of(tmp_path, (3, 12))


def test_the_glibc_a_wheel_needs_is_read_from_its_name() -> None:
    assert wheels.needed_glibc("kvbm_ledger-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl") == (2, 34)
    assert wheels.needed_glibc("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl") == (2, 17)
    with pytest.raises(wheels.WheelsError, match="no manylinux platform"):
        wheels.needed_glibc("kvbm_ledger-0.1.0-cp312-abi3-linux_x86_64.whl")


def wheel_with(folder: Path, names: Iterable[str]) -> Path:
    path = folder / "kvbm_ledger-0.1.0-cp312-abi3-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path, "w") as made:
        for name in names:
            made.writestr(name, "")
    return path


def modules() -> set[str]:
    """Every module of this checkout's packages, as a wheel names it."""
    return {
        str(path.relative_to(wheels.ROOT)) for name in wheels.PACKAGES for path in (wheels.ROOT / name).rglob("*.py")
    }


def test_a_wheel_holds_all_modules_but_those_that_measure_and_compare(tmp_path: Path) -> None:
    measured = {name for name in modules() if name.startswith("kvbm/bench/")}
    page = {str(path.relative_to(wheels.ROOT)) for path in (wheels.ROOT / wheels.WEB).rglob("*") if path.is_file()}
    shipped = (modules() - measured) | page
    assert {"kvbm/bench/report.py", "kvbm/bench/virtual_time/policies.py"} <= measured
    wheels.check_contents(wheel_with(tmp_path, {*shipped, "kvbm/py.typed", "kvbm/migrations/versions/0001_first.py"}))
    for names, words in (
        ({*shipped, "kvbm/bench/report.py"}, "holds kvbm/bench/report.py, which wheels leave out"),
        (modules() | page, "which wheels leave out"),
        (shipped - {"kvbm/catalog/web/views/block.js"}, "lacks kvbm/catalog/web/views/block.js"),
        (shipped - {"kvbm/cli.py"}, "lacks kvbm/cli.py"),
        ({*shipped, "kvbm/engines/gone.py"}, "holds, and this checkout does not, kvbm/engines/gone.py"),
    ):
        with pytest.raises(wheels.WheelsError, match=words):
            wheels.check_contents(wheel_with(tmp_path, names))


def test_a_command_of_the_wheel_that_should_be_refused_must_say_where_it_runs(tmp_path: Path) -> None:
    says = "import sys; print('it runs from a checkout'); raise SystemExit(int(sys.argv[1]))"
    wheels._refused([sys.executable, "-c", says, "2"], tmp_path, tmp_path)
    for command in ([sys.executable, "-c", says, "0"], [sys.executable, "-c", "raise SystemExit(2)"]):
        with pytest.raises(wheels.WheelsError, match="not 2 and where it runs"):
            wheels._refused(command, tmp_path, tmp_path)


def test_a_python_that_only_seems_to_be_on_the_path_is_passed_over(
    no_other_pythons: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pyenv's shim of a version that is not chosen exists, and fails."""
    name = f"python{HERE[0]}.{HERE[1]}"
    program(no_other_pythons / "bin" / name, "#!/bin/sh\nexit 127\n")
    program(
        no_other_pythons / "pyenv" / "versions" / f"{HERE[0]}.{HERE[1]}.9" / "bin" / name,
        f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    )
    (found,) = wheels.found_pythons()
    assert found.version == HERE
    missing = [version for version in wheels.PYTHONS if version != HERE]
    told = capsys.readouterr().err
    assert all(f"no Python {major}.{minor} with venv here; left out" in told for major, minor in missing)


def test_without_any_python_that_can_build_it_says_what_to_install(no_other_pythons: Path, tmp_path: Path) -> None:
    with pytest.raises(wheels.WheelsError, match="python3-dev and python3-venv"):
        wheels.build_wheels(tmp_path / "dist")
    with pytest.raises(wheels.WheelsError, match="no Python of"):
        wheels.try_wheels(tmp_path / "dist", demo=False)


def test_a_command_that_fails_is_told_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(wheels.WheelsError, match=r"returned 3: .*\n  gone"):
        wheels._run([sys.executable, "-c", "print('gone'); raise SystemExit(3)"])
