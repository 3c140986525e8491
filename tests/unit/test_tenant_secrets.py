"""Secrets of tenants change at one moment, everywhere, and a file that cannot be used changes nothing."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvbm import files
from kvbm.core.errors import ConfigError
from kvbm.tenant_secrets import TenantSecrets

CHANGE_S = datetime(2026, 12, 1, 4, tzinfo=UTC).timestamp()


class Times:
    def __init__(self) -> None:
        self.now_s, self.clock_s = CHANGE_S - 100.0, 0.0

    def go_on(self, seconds: float) -> None:
        self.now_s += seconds
        self.clock_s += seconds


def opened(path: Path, times: Times, **fixed: str) -> TenantSecrets:
    return TenantSecrets(fixed, str(path), lambda: times.now_s, lambda: times.clock_s)


def write(path: Path, text: str) -> None:
    """Put a file in the place of another, as an operator should."""
    beside = path.with_name("beside")
    beside.write_text(text)
    os.replace(beside, path)


def test_a_file_written_again_in_the_tick_in_which_it_was_read_is_read_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times, path = Times(), tmp_path / "secrets.toml"
    written_ns, now_ns = 10**18, [10**18 + 10**6]
    monkeypatch.setattr(files, "stamp", lambda path: (written_ns, written_ns, 7, 9))  # the same tick, size and file
    monkeypatch.setattr(files.time, "time_ns", lambda: now_ns[0])
    write(path, '[tenants.acme]\nsecret = "old"\n')
    secrets = opened(path, times)
    write(path, '[tenants.acme]\nsecret = "new"\n')
    times.go_on(60.0)
    now_ns[0] += 60 * 10**9
    assert secrets["acme"] == "new"
    write(path, '[tenants.acme]\nsecret = "xxx"\n')  # no clock would hide this one
    times.go_on(60.0)
    assert secrets["acme"] == "new"


CHANGING = '[tenants.acme]\nsecret = "old"\nnext = "new"\nnext_from = 2026-12-01T04:00:00Z\n'


def test_all_who_have_the_file_change_over_at_the_same_moment(tmp_path: Path) -> None:
    times, path = Times(), tmp_path / "secrets.toml"
    write(path, '[tenants.acme]\nsecret = "old"\n')
    early, late = opened(path, times, globex="fixed"), opened(path, times)
    write(path, CHANGING)
    times.go_on(60.0)
    assert (early["acme"], late["acme"], early["globex"]) == ("old", "old", "fixed")
    times.go_on(39.9)
    assert (early["acme"], late["acme"]) == ("old", "old")
    times.go_on(0.1)
    assert (early["acme"], late["acme"]) == ("new", "new")
    write(path, '[tenants.acme]\nsecret = "new"\n')
    times.go_on(2.0)
    assert (early["acme"], opened(path, times)["acme"]) == ("new", "new")
    assert set(early) == {"acme", "globex"} and early.get("nobody") is None


def test_a_file_that_cannot_be_used_is_refused_at_the_start_and_changes_nothing_later(tmp_path: Path) -> None:
    times, path = Times(), tmp_path / "secrets.toml"
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(path, times)
    write(path, '[tenants.acme]\nsecret = "old"\n')
    secrets = opened(path, times)
    for bad in (
        "",
        "x",
        "[tenants]\nacme = 3",
        '[tenants.acme]\nsecret = "a"\nnext = "b"',
        '[tenants.acme]\nsecrets = "a"',
        '[tenants.acme]\nsecret = "a"\nnext = "b"\nnext_from = 2026-12-01T04:00:00',
        '[tenants.acme]\nsecret = ""',
        '[tenants.acme]\nsecret = "a"\nnext = ""\nnext_from = 2026-12-01T04:00:00Z',
        f"tenants = {'[' * 100_000}",
    ):
        write(path, bad)
        times.go_on(2.0)
        assert secrets["acme"] == "old"
        with pytest.raises(ConfigError, match="write") as refused:
            opened(path, times)
        assert '"b"' not in str(refused.value)
    path.unlink()
    times.go_on(2.0)
    assert secrets["acme"] == "old"


def test_a_tenant_that_is_no_longer_in_the_file_keeps_its_secret(tmp_path: Path) -> None:
    """It may be half a file. Without a secret anybody could compute the tenant's hashes."""
    times, path = Times(), tmp_path / "secrets.toml"
    both = '[tenants.acme]\nsecret = "of acme"\n[tenants.beta]\nsecret = "of beta"\n'
    write(path, both)
    secrets = opened(path, times)
    for part in (both[: both.index("[tenants.beta]")].replace("of acme", "other"), "[tenants]\n"):
        write(path, part)
        times.go_on(2.0)
        with capture_logs() as logs:
            assert (secrets["acme"], secrets["beta"]) == ("other", "of beta")
        assert next(one["tenants"] for one in logs if one["event"] == "secrets.missing")[-1] == "beta"
    assert "beta" not in opened(path, times)
