"""The folder of keys that `kvbm nats-permissions` keeps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvbm.cli import main
from kvbm.core.errors import ConfigError
from kvbm.streams.nats.credentials import keep_seed
from kvbm.streams.nats.key_folder import KeyChange, Printed, print_accounts
from kvbm.streams.nats.permissions import Role

GPU = [(Role.INSTANCE, f"gpu-{at}") for at in range(3)]
NOW_S = 1_800_000_000.0
FEW = KeyChange(spare=2)


def printed(folder: Path, wanted: list[tuple[Role, str]], change: KeyChange = FEW) -> Printed:
    return print_accounts(folder, "prod", wanted, change, NOW_S)


def accounts(what: Printed) -> dict[str, Any]:
    text = "".join(line for line in what.text.splitlines(keepends=True) if not line.startswith("#"))
    found: dict[str, Any] = json.loads(text.removeprefix("accounts "))
    return found


def account_of(what: Printed, seed: Path) -> str:
    public = keep_seed(seed)
    (name,) = (
        name for name, one in accounts(what).items() if public in [user["nkey"] for user in one.get("users", [])]
    )
    return name


def test_a_user_keeps_its_account_whoever_comes_or_goes(tmp_path: Path) -> None:
    first = printed(tmp_path, GPU)
    own = {name: account_of(first, tmp_path / f"instance-{name}.nk") for _, name in GPU}
    assert len(set(own.values())) == 3
    second = printed(tmp_path, [GPU[2], GPU[0], (Role.REPLAY, "desk")])
    assert account_of(second, tmp_path / "instance-gpu-0.nk") == own["gpu-0"]
    assert account_of(second, tmp_path / "instance-gpu-2.nk") == own["gpu-2"]
    assert account_of(second, tmp_path / "replay-desk.nk") not in own.values()
    assert printed(tmp_path, [GPU[2], GPU[0], (Role.REPLAY, "desk")]).text == second.text


@pytest.mark.parametrize("role", [Role.INSTANCE, Role.JANITOR])
@pytest.mark.parametrize("name", ["_catalog-1", "catalog:1", "objects:1", "", "a.b", "a" * 129])
def test_nobody_has_an_account_under_a_name_that_is_kept_for_catalogs_and_pools(
    tmp_path: Path, role: Role, name: str
) -> None:
    with pytest.raises(ConfigError, match="is no name; use 1 to 128 letters"):
        printed(tmp_path, [(role, name)])
    assert list(tmp_path.iterdir()) == []


def test_who_is_added_has_an_account_that_was_spare_before(tmp_path: Path) -> None:
    first = printed(tmp_path, GPU[:1])
    spares = {name for name, one in accounts(first).items() if not one}
    assert len(spares) == 2
    second = printed(tmp_path, GPU)
    added = {account_of(second, tmp_path / f"instance-gpu-{at}.nk") for at in (1, 2)}
    assert added == spares
    assert not second.remarks
    assert len([name for name, one in accounts(second).items() if not one]) == 2


def test_more_users_than_spare_accounts_are_told_to_reload_twice(tmp_path: Path) -> None:
    assert not printed(tmp_path, GPU[:1], KeyChange(spare=1)).remarks
    (remark,) = printed(tmp_path, GPU, KeyChange(spare=1)).remarks
    assert "instance-gpu-2" in remark and "instance-gpu-1" not in remark and "twice" in remark


def test_who_is_no_longer_named_is_told_of_before_the_server_turns_it_away(tmp_path: Path) -> None:
    printed(tmp_path, [*GPU, (Role.JANITOR, "gc-0")])
    (remark,) = printed(tmp_path, GPU[1:]).remarks  # as somebody does who names only whom a refusal has named
    assert (
        remark.startswith("instance-gpu-0, janitor-gc-0 had an account and has none now")
        and "name them again" in remark
    )
    assert not printed(tmp_path, GPU[1:]).remarks


def test_a_command_that_fails_leaves_the_accounts_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without accounts nats-server lets everybody in: an empty file would open the stream at the next reload."""
    out, given = tmp_path / "accounts.conf", ["nats-permissions", "--keys", str(tmp_path / "keys"), "--out"]
    assert main([*given, str(out), "--instance", "gpu-0"]) == 0
    assert (capsys.readouterr().out, out.stat().st_mode & 0o777) == ("", 0o600)
    out.chmod(0o644)  # for the user of nats-server
    before = out.read_bytes()
    assert before.startswith(b"accounts {")
    assert main([*given, str(out), "--instance", "gpu-0", "--renew", "instance-gpu-O"]) == 2
    assert out.read_bytes() == before
    assert main([*given, str(out), "--instance", "gpu-0", "--instance", "gpu-1"]) == 0
    assert (out.read_bytes() != before, out.stat().st_mode & 0o777) == (True, 0o644)
    assert main([*given, str(tmp_path), "--instance", "gpu-0"]) == 2
    assert f"--out {tmp_path} cannot be written" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_keys_without_a_list_of_accounts_get_new_ones_and_it_is_said(tmp_path: Path) -> None:
    assert not printed(tmp_path, GPU).remarks
    (tmp_path / "accounts.json").unlink()  # or an older kvbm made the keys
    (remark,) = printed(tmp_path, GPU).remarks
    assert all(f"instance-{name}" in remark for _, name in GPU) and "or restart it" in remark


def test_two_keys_are_permitted_from_renewal_to_retirement_and_it_is_said_until_when(tmp_path: Path) -> None:
    seed, following = tmp_path / "instance-gpu-0.nk", tmp_path / "instance-gpu-0.next.nk"
    printed(tmp_path, GPU)
    old = seed.read_bytes()
    renewed = printed(tmp_path, GPU, KeyChange(renew=["instance-gpu-0"], overlap_s=3600.0))
    os.utime(following, (NOW_S, NOW_S))
    assert (seed.read_bytes(), following.read_bytes() != old) == (old, True)
    (remark,) = printed(tmp_path, GPU, KeyChange(overlap_s=3600.0)).remarks
    assert "two keys until 2027-01-15T09:00Z" in remark and "--retire instance-gpu-0" in remark
    assert remark in printed(tmp_path, GPU, KeyChange(overlap_s=3600.0)).text.splitlines()[0]
    (late,) = print_accounts(tmp_path, "prod", GPU, KeyChange(overlap_s=3600.0), NOW_S + 3601.0).remarks
    assert "still, though it was meant to" in late
    users = accounts(renewed)[account_of(renewed, seed)]["users"]
    assert [user["nkey"] for user in users] == [keep_seed(seed), keep_seed(following)]
    assert users[0]["permissions"] == users[1]["permissions"]
    new = following.read_bytes()
    retired = printed(tmp_path, GPU, KeyChange(retire=["instance-gpu-0"]))
    assert (seed.read_bytes(), following.exists()) == (new, False)
    assert len(accounts(retired)[account_of(retired, seed)]["users"]) == 1
    assert not retired.remarks


def test_the_catalogs_key_is_renewed_as_others_are(tmp_path: Path) -> None:
    printed(tmp_path, GPU)
    assert len(accounts(printed(tmp_path, GPU, KeyChange(renew=["catalog"])))["KVBM"]["users"]) == 2
    assert len(accounts(printed(tmp_path, GPU, KeyChange(retire=["catalog"])))["KVBM"]["users"]) == 1


def test_only_the_owner_reads_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    printed(folder, [*GPU, (Role.JANITOR, "gc-0"), (Role.OPERATOR, "ops")], KeyChange())
    printed(folder, GPU, KeyChange(renew=["catalog"]))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {
        "accounts.json",
        "catalog.nk",
        "catalog.next.nk",
        "instance-gpu-0.nk",
        "instance-gpu-1.nk",
        "instance-gpu-2.nk",
        "janitor-gc-0.nk",
        "operator-ops.nk",
    }


@pytest.mark.parametrize(
    ("wanted", "change", "words"),
    [
        ([(Role.INSTANCE, "a.b")], KeyChange(), "is no name"),
        ([(Role.REPLAY, "../x")], KeyChange(), "is no name"),
        ([(Role.INSTANCE, "a"), (Role.INSTANCE, "a")], KeyChange(), "an instance is named twice"),
        ([(Role.INSTANCE, "a"), (Role.JANITOR, "a")], KeyChange(), "an instance is named twice"),
        ([(Role.REPLAY, "a"), (Role.REPLAY, "a")], KeyChange(), "replay a is named twice"),
        ([(Role.INSTANCE, "a")], KeyChange(renew=["instance-b"]), "--renew instance-b is none of those named"),
        ([(Role.INSTANCE, "a")], KeyChange(renew=["instance-a"]), "it has no key yet"),
        ([(Role.INSTANCE, "a")], KeyChange(retire=["catalog"]), "it has no second key"),
        ([], KeyChange(spare=-1), "--spare is -1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, wanted: list[tuple[Role, str]], change: KeyChange, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        printed(tmp_path / "keys", wanted, change)
    assert not (tmp_path / "keys").exists()


def test_a_damaged_list_of_accounts_is_said(tmp_path: Path) -> None:
    (tmp_path / "accounts.json").write_text("{")
    with pytest.raises(ConfigError, match=r"accounts\.json cannot be read"):
        printed(tmp_path, GPU)
