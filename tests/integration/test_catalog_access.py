"""Who may ask the catalog: tokens, certificates, roles, and how they change while it serves."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import urllib3
from structlog.testing import capture_logs

import kvbm.catalog.access.callers
import kvbm.catalog.edge.tls
import kvbm.files
import kvbm.locate.credentials
from kvbm.assembly import NATIVE, NATIVE_INDEX
from kvbm.catalog.access.callers import AT_ONCE_BYTES, EMBEDDED, Access, AccessOptions, check_exposed
from kvbm.catalog.access.file import CallerEntry, NewToken, hashed, read_entries
from kvbm.catalog.edge.server import CatalogThread
from kvbm.catalog.service import ServiceSettings
from kvbm.catalog_cli import catalog_main
from kvbm.cli import replay_main
from kvbm.command_line import write_out
from kvbm.config import load_settings
from kvbm.core.errors import CatalogError, CatalogRefusedError, ConfigError
from kvbm.locate.base import NOTHING_FOUND
from kvbm.locate.credentials import CatalogCredentials
from kvbm.locate.http import CatalogClient
from kvbm.locate.locator import HttpLocator
from kvbm.pools.tenant_keys import add_key
from kvbm.streams.nats.key_folder import KeyChange, print_accounts
from kvbm.streams.nats.permissions import Role
from kvbm.workload.probe import ask as probe
from tests.callers import ACME, hashes_in
from tests.certificates import Certificate, certify
from tests.eventually import WAIT_S, eventually
from tests.secured_catalogs import Files, cluster, files, look_at_once, nats_url, put, serve

__all__ = ["cluster", "files", "look_at_once", "nats_url", "serve"]

Client = partial(CatalogClient, timeout_s=WAIT_S)
OPERATOR = NewToken("ops", "operator")
ACME_ROUTER = NewToken("acme", "router", ["acme"])


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_token_is_random_and_the_file_has_its_hash_alone(files: Files) -> None:
    tokens = {files.token(NewToken(f"r{at}", "router", ["acme"])) for at in range(5)}
    text = files.access.read_text()
    assert len(tokens) == 5
    assert all(len(token) >= 43 and token not in text and hashed(token) in text for token in tokens)
    assert stat.S_IMODE(files.access.stat().st_mode) == 0o600
    assert [one.name for one in files.folder.iterdir() if one.name.startswith(".")] == []


def test_writing_a_file_and_reading_it_gives_the_same_callers(files: Files) -> None:
    now_s = time.time() // 1
    files.token(NewToken("r", "router", ["", 'a"b', "ünï"], expires_s=100.0), now_s=now_s)
    files.token(NewToken("all", "router"))
    files.token(NewToken("m", "metrics"))
    entries = {one.name: one for one in read_entries(files.access)}
    assert entries["r"].tenants == {"", 'a"b', "ünï"}
    assert entries["r"].not_after == pytest.approx(now_s + 100)
    assert (entries["all"].tenants, entries["m"].tenants, entries["m"].role) == (None, None, "metrics")


def test_many_commands_at_a_time_lose_no_token(files: Files) -> None:
    threads = [threading.Thread(target=files.token, args=(NewToken(f"r{at}", "router", ["acme"]),)) for at in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_entries(files.access)) == 12


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names nobody"),
        ("[[token]\n", "is not TOML"),
        ("[[user]]\nname = 'a'\n", "'user'"),
        ("[[token]]\nname = 'a'\nrole = 'king'\nsha256 = '00'\n", "role is 'king'"),
        ("[[token]]\nname = 'a'\nrole = 'operator'\nsha256 = '00'\n", "64 hex digits"),
        (f"[[token]]\nname = 'a'\nrole = 'router'\nsha256 = '{'0' * 64}'\n", "tenants is None"),
        (f"[[token]]\nname = 'a'\nrole = 'operator'\ntenants = ['x']\nsha256 = '{'0' * 64}'\n", "and others none"),
        (f"[[token]]\nname = 'a'\nrole = 'operator'\nsha256 = '{'0' * 64}'\nnot_after = 2026-01-01\n", "with its zone"),
        (f"[[token]]\nname = 'a'\nrole = 'operator'\nsha256 = '{'0' * 64}'\n" * 2, "one token twice"),
        (f"[[token]]\nname = 'a'\nrole = 'operator'\nsha256 = '{'0' * 64}'\ntoken = 'x'\n", "no entry 'token'"),
        (f"[[token]]\nname = 'a'\nrole = 'operator'\nsha256 = '{hashed('')}'\n", "of an empty token"),
        ("\xff", "cannot|not TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_in_a_sentence(files: Files, text: str, why: str) -> None:
    files.access.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=why):
        Access(str(files.access))


def test_a_file_others_may_write_and_one_that_is_none_are_refused(files: Files) -> None:
    files.token(OPERATOR)
    files.access.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod 600"):
        Access(str(files.access))
    pipe = files.folder / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="no plain file"):
        Access(str(pipe))
    with pytest.raises(ConfigError, match="kvbm-catalog token"):
        Access(str(files.folder / "none"))


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's than who runs this."""
    if os.geteuid() == 0:
        os.chown(path, 54_321, 54_321)
    else:
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)


def test_a_file_of_another_user_lets_nobody_in(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    token = files.token(OPERATOR)
    access = Access(str(files.access))
    give_away(files.access, monkeypatch)
    with pytest.raises(ConfigError, match=r"belongs to user .* chown"):
        Access(str(files.access))
    with capture_logs():
        assert access.caller(f"Bearer {token}", None) is not None  # as before
    assert "belongs to user" in access.trouble


def test_a_file_that_the_command_has_written_counts_whole_or_not_at_all(files: Files) -> None:
    files.token(OPERATOR)
    files.token(ACME_ROUTER._replace(expires_s=60.0))  # without its last line the token would be good for ever
    lines = files.access.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        files.access.write_text("".join(lines[:count]))
        with pytest.raises(ConfigError, match=r"cut off|names nobody"):
            read_entries(files.access)
    files.access.write_text("".join(lines) + '[[nats]]\nname = "by-hand"\nrole = "metrics"\n')
    assert [one.name for one in read_entries(files.access)] == ["ops", "acme", "by-hand"]


def test_a_file_that_is_being_written_counts_once_it_stays(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm.catalog.access.callers, "LOOK_S", 1.0)
    now = [100.0]
    entries = [f"[[token]]\nname = '{name}'\nrole = 'operator'\nsha256 = '{hashed(name)}'\n" for name in "abc"]
    files.access.write_text("".join(entries))  # by hand
    access = Access(str(files.access), clock=lambda: now[0])

    def known() -> str:
        now[0] += 1.0
        return "".join(name for name in "abcd" if access.caller(f"Bearer {name}", None) is not None)

    files.access.write_text(entries[0])
    assert known() == "abc"  # it has just changed: perhaps there is more to come
    files.access.write_text("".join(entries[:2]))
    assert known() == "abc"
    assert known() == "ab"  # it has stayed so
    assert access.trouble == ""
    with capture_logs():
        files.access.write_text("")
        assert known() == "ab"
        assert known() == "ab" and "names nobody" in access.trouble
        files.access.write_text(entries[0])  # nor is half a file taken where the one before it was bad
        assert known() == "ab"
    files.access.write_text("".join(entries))
    assert known() == "ab"
    assert known() == "abc" and access.trouble == ""


@pytest.mark.parametrize(("age_ns", "counts"), [(10**6, "new"), (60 * 10**9, "old")])
def test_a_file_that_changes_while_it_is_first_read_is_read_once_more(
    age_ns: int, counts: str, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No stamp tells the change: it has the same size, and comes in the same tick.

    Of a file that is older no change is hidden.
    """
    written_ns = time.time_ns()
    monkeypatch.setattr("kvbm.files.stamp", lambda _: (written_ns, written_ns, 7, 9))
    monkeypatch.setattr("kvbm.files.time.time_ns", lambda: written_ns + age_ns)
    entry = "[[token]]\nname = 'r'\nrole = 'operator'\nsha256 = '{}'\n"
    files.access.write_text(entry.format(hashed("old")))
    access = Access(str(files.access))
    files.access.write_text(entry.format(hashed("new")))
    for token in ("old", "new"):
        assert (access.caller(f"Bearer {token}", None) is not None) == (token == counts)


def test_a_long_file_is_read_beside_the_loop(
    files: Files, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.token(OPERATOR)
    url = serve(file=str(files.access))
    read_by: set[str] = set()

    def read(path: Path) -> list[CallerEntry]:
        read_by.add(threading.current_thread().name)
        return read_entries(path)

    monkeypatch.setattr(kvbm.catalog.access.callers, "read_entries", read)
    entry = "[[token]]\nname = 'r{}'\nrole = 'operator'\nsha256 = '{}'\n"
    text = "".join(entry.format(at, hashed(str(at))) for at in range(500))
    assert len(text) > AT_ONCE_BYTES
    beside = files.folder / "beside"
    beside.write_text(text)
    beside.chmod(0o600)
    beside.replace(files.access)
    client = Client(url, credentials=CatalogCredentials(files.kept("last", "499")))
    eventually(lambda: answers(client), "the last of the file's callers is not known")
    assert read_by and "kvbm-catalog" not in read_by


def answers(client: CatalogClient) -> bool:
    """Whether the catalog knows who asks."""
    try:
        client.namespaces()
    except CatalogRefusedError:
        return False
    return True


# -- rotation ----------------------------------------------------------------------------------------------------------


def test_the_common_name_counts_only_where_no_other_name_stands(files: Files) -> None:
    files.access.write_text('[[certificate]]\nname = "ops"\nrole = "operator"\n')
    files.access.chmod(0o600)
    access = Access(str(files.access))
    shown = {"notAfter": "Jan  1 00:00:00 2099 GMT", "subject": ((("commonName", "ops"),),)}
    found = access.caller(None, shown)
    assert found is not None
    assert found.role == "operator"
    assert access.caller(None, shown | {"subjectAltName": (("DNS", "router-of-a-tenant"),)}) is None
    assert access.caller(None, shown | {"subject": (), "subjectAltName": (("DNS", "ops"),)}) is not None


@pytest.mark.parametrize("damage", ["", None, "[[token]]\n", "\0" * 100])
def test_a_file_that_is_emptied_or_gone_shuts_nobody_out_and_lets_nobody_in(files: Files, damage: str | None) -> None:
    token = files.token(OPERATOR)
    access = Access(str(files.access))
    if damage is None:
        files.access.unlink()
    else:
        files.access.write_text(damage)
    with capture_logs():
        assert access.caller(f"Bearer {token}", None) is not None
        assert access.caller("Bearer kvbm_other", None) is None
        assert access.caller(None, None) is None
    assert access.trouble
    with pytest.raises(ConfigError):
        Access(str(files.access))


def test_two_tokens_of_a_name_are_good_together_until_the_older_is_retired(files: Files) -> None:
    now = [1_800_000_000.0]
    first = files.token(ACME_ROUTER, now[0])
    with pytest.raises(ConfigError, match="--replace"):
        files.token(ACME_ROUTER, now[0])
    second = files.token(ACME_ROUTER._replace(replace_s=60.0), now[0])
    access = Access(str(files.access), wall_clock=lambda: now[0])
    assert [access.caller(f"Bearer {token}", None) for token in (first, second)] == [
        ("acme", "router", frozenset({"acme"}))
    ] * 2
    now[0] += 59
    assert access.caller(f"Bearer {first}", None) is not None
    now[0] += 1
    assert access.caller(f"Bearer {first}", None) is None
    assert access.caller(f"Bearer {second}", None) is not None
    third = files.token(ACME_ROUTER._replace(replace_s=0.0), now[0])
    assert access.caller(f"Bearer {second}", None) is None
    assert access.caller(f"Bearer {third}", None) is not None
    assert len(read_entries(files.access)) == 2  # what had run out is gone


def test_a_file_is_read_again_when_it_changes_and_a_damaged_one_keeps_the_old_and_says_so_once(files: Files) -> None:
    token = files.token(OPERATOR)
    access = Access(str(files.access))
    good = files.access.read_text()
    with capture_logs() as logs:
        for damaged in ("[[token", "", good[: len(good) // 2]):
            files.access.write_text(damaged)
            assert access.caller(f"Bearer {token}", None) is not None
            assert "callers are as before" in access.trouble
        files.access.unlink()
        assert access.caller(f"Bearer {token}", None) is not None
    assert [line["event"] for line in logs] == ["catalog.access_kept"]
    files.access.write_text(good.replace(hashed(token), "0" * 64))
    files.access.chmod(0o600)
    assert access.caller(f"Bearer {token}", None) is None
    assert access.trouble == ""


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "Bearer x{}", "Bearer " + "a" * 100_000, "Bearer \x00{}"],
)
def test_a_header_that_is_not_a_good_token_is_nobody(files: Files, header: str) -> None:
    token = files.token(OPERATOR)
    access = Access(str(files.access))
    assert access.caller(header.replace("{}", token), None) is None
    assert access.caller(f"bearer {token}", None) is not None
    assert access.caller(None, None) is None


# -- where it listens --------------------------------------------------------------------------------------------------


def test_beyond_the_loopback_it_starts_with_callers_or_when_told_so() -> None:
    for address in ("127.0.0.1", "127.3.2.1", "::1"):
        check_exposed(AccessOptions(), address)
    for address in ("0.0.0.0", "::", "192.0.2.1", "fe80::1%eth0"):
        with pytest.raises(ConfigError, match=r"catalog\.open"):
            check_exposed(AccessOptions(), address)
        check_exposed(AccessOptions(open=True), address)
        check_exposed(AccessOptions(file="access.toml"), address)
    assert Access().caller("Bearer whatever", None) == EMBEDDED
    with pytest.raises(ConfigError, match=r"catalog\.access"):
        check_exposed(AccessOptions(tls_client_ca="ca.pem", tls_cert="c", tls_key="k"), "127.0.0.1")
    with pytest.raises(ConfigError, match=r"without catalog\.tls_key"):
        check_exposed(AccessOptions(tls_cert="c"), "127.0.0.1")


def test_a_catalog_for_all_the_world_refuses_to_start(nats_url: str, cluster: str, sqlite_url: str) -> None:
    settings = ServiceSettings(
        nats_url=nats_url, database_url=sqlite_url, cluster=cluster, listen="0.0.0.0:0", connect_s=WAIT_S
    )
    with pytest.raises(ConfigError, match="would answer everybody"):
        CatalogThread(settings, NATIVE, NATIVE_INDEX).start()


# -- over sockets ------------------------------------------------------------------------------------------------------


def test_roles_over_tls(files: Files, serve: Callable[..., str]) -> None:
    tokens = {one.name: files.token(one) for one in (OPERATOR, ACME_ROUTER, NewToken("prometheus", "metrics"))}
    url = serve(file=str(files.access), tls_cert=str(files.server.cert), tls_key=str(files.server.key))
    assert url.startswith("https://")
    with urllib3.PoolManager(ca_certs=str(files.ca.cert)) as pool:

        def status(who: str, path: str, method: str = "GET") -> int:
            headers = {"authorization": f"Bearer {tokens[who]}"} if who else {}
            return pool.request(method, url + path, headers=headers).status

        eventually(lambda: status("ops", "/readyz") == 200)
        for path, allowed in {
            "/healthz": {"", "ops", "acme", "prometheus"},
            "/readyz": {"", "ops", "acme", "prometheus"},
            "/metrics": {"ops", "prometheus"},
            "/v1/instances": {"ops", "acme"},
            "/v1/namespaces": {"ops", "acme"},
            "/v1/usage": {"ops", "acme"},
            f"/v1/blocks/{'0' * 32}/{'0' * 32}": {"ops", "acme"},
            "/openapi.json": {"ops", "acme"},
            "/": {"ops"},
        }.items():
            for who in ("", *tokens):
                expected = 200 if who in allowed else 403 if who else 401
                assert status(who, path) == expected, (who, path)
        assert status("acme", "/v1/checkpoint") == 403  # it has the blocks of all tenants
        assert status("ops", "/v1/checkpoint") == 404  # this catalog writes none
        assert status("acme", "/v1/instances/a/snapshot", "POST") == 403
        assert status("ops", "/v1/instances/a/snapshot", "POST") == 404
        assert status("acme", "/nothing") == 403
        assert status("", "/nothing") == 401
        refused = pool.request("GET", url + "/v1/instances")
        assert refused.headers["www-authenticate"] == "Bearer"
        ready = pool.request("GET", url + "/readyz").json()
        assert ready == {"ready": True, "reason": ""}  # and nothing that is made up
        metrics = pool.request(
            "GET", url + "/metrics", headers={"authorization": f"Bearer {tokens['prometheus']}"}
        ).data.decode()
        assert 'kvbm_catalog_requests_total{caller="acme",outcome="forbidden"}' in metrics
        assert not any(token in metrics for token in tokens.values())


def test_a_client_with_token_and_ca_is_answered_and_others_are_told_why(
    files: Files, serve: Callable[..., str]
) -> None:
    operator, router = files.kept("ops", files.token(OPERATOR)), files.kept("acme", files.token(ACME_ROUTER))
    url = serve(file=str(files.access), tls_cert=str(files.server.cert), tls_key=str(files.server.key))
    ca = str(files.ca.cert)
    good = Client(url, credentials=CatalogCredentials(operator, ca))
    good.wait_ready(WAIT_S)
    assert good.instances() == []
    limited = Client(url, credentials=CatalogCredentials(router, ca))
    assert limited.lookup(ACME, hashes_in(ACME)).deepest == 0
    with pytest.raises(CatalogRefusedError, match="role may not ask this") as forbidden:
        limited.metrics()
    assert forbidden.value.status == 403
    nobody = Client(url, credentials=CatalogCredentials("", ca))
    with pytest.raises(CatalogRefusedError, match="does not know who asks") as unknown:
        nobody.instances()
    assert unknown.value.status == 401
    for _ in range(3):  # a body nobody reads does not harm the next request
        with pytest.raises(CatalogRefusedError, match="does not know who asks"):
            nobody.lookup(ACME, hashes_in(ACME) * 1000)
    with pytest.raises(CatalogError, match=r"correct catalog\.tls_ca"):
        Client(url, credentials=CatalogCredentials(operator)).instances()  # the system does not know this CA
    with pytest.raises(ConfigError, match=r"catalog\.token .* cannot be read"):
        Client(url, credentials=CatalogCredentials(str(files.folder / "none"), ca))
    asked = load_settings(flags={"catalog.url": url, "catalog.token": operator, "catalog.tls_ca": ca})
    assert probe(f"{url}/v1/instances", asked).is_well
    assert not probe(f"{url}/v1/instances", load_settings(flags={"catalog.tls_ca": ca})).is_well
    several = load_settings(
        flags={"catalog.url": f"http://a:1,http://b:1; {url}", "catalog.token": operator, "catalog.tls_ca": ca}
    )
    assert probe(f"{url}/v1/instances", several).is_well


def test_a_comparison_with_a_routers_token_says_whose_is_needed(
    files: Files,
    serve: Callable[..., str],
    nats_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A router is told of no counts: each instance would seem to be behind."""
    tokens = {"ops": files.kept("ops", files.token(OPERATOR)), "acme": files.kept("acme", files.token(ACME_ROUTER))}
    url = serve(file=str(files.access))
    Client(url, credentials=CatalogCredentials(tokens["ops"])).wait_ready(WAIT_S)

    def said(name: str) -> str:
        replay_main(
            ["verify", nats_url, "--timeout", f"{WAIT_S:g}", "--catalog", url, "--set", f"catalog.token={tokens[name]}"]
        )
        found = capsys.readouterr()
        return found.out + found.err

    assert "ask with the token of an operator" in said("acme")
    assert "ask with the token" not in said("ops")


def test_a_refused_manager_has_a_miss_and_one_warning(files: Files, serve: Callable[..., str]) -> None:
    files.token(OPERATOR)
    url = serve(file=str(files.access))
    now = [0.0]
    locator = HttpLocator(url, clock=lambda: now[0])
    with capture_logs() as logs:
        for _ in range(5):
            assert locator.find("p", ACME.id, hashes_in(ACME), 0, WAIT_S) == NOTHING_FOUND
            now[0] += 60
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["catalog.lost"]
    locator.close()


def test_a_token_is_replaced_under_load_without_a_refusal(files: Files, serve: Callable[..., str]) -> None:
    path = files.kept("acme", files.token(ACME_ROUTER))
    url = serve(file=str(files.access))
    client = Client(url, credentials=CatalogCredentials(path))
    client.wait_ready(WAIT_S)
    stop, failed, asked = threading.Event(), [], [0]

    def ask() -> None:
        while not stop.is_set():
            try:
                client.lookup(ACME, hashes_in(ACME))
                asked[0] += 1
            except CatalogError as error:
                failed.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(5):
        new = files.token(ACME_ROUTER._replace(replace_s=3600.0))
        beside = files.folder / "new"
        beside.write_text(new)
        beside.replace(path)
        before = asked[0]
        eventually(lambda before=before: asked[0] > before + 3)
    stop.set()
    thread.join()
    assert failed == []
    text = files.access.read_text()
    files.access.write_text(
        "\n".join(line for line in text.splitlines() if "not_after" not in line)
    )  # all good for ever
    client.close()


def test_a_client_reads_its_token_again_after_a_401(
    files: Files, serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvbm.locate.credentials, "LOOK_S", 3600.0)
    path = files.kept("acme", files.token(ACME_ROUTER))
    url = serve(file=str(files.access))
    client = Client(url, credentials=CatalogCredentials(path))
    client.wait_ready(WAIT_S)
    client.namespaces()
    new = files.token(ACME_ROUTER._replace(replace_s=0.0))
    with pytest.raises(CatalogRefusedError, match="does not know who asks"):
        client.namespaces()
    files.kept("acme", new)
    assert client.namespaces() == []
    client.close()


# -- certificates ------------------------------------------------------------------------------------------------------


def test_a_client_certificate_names_a_caller(files: Files, serve: Callable[..., str]) -> None:
    operator = files.token(OPERATOR)
    beta, stranger = certify(files.folder, "router-beta", files.ca), certify(files.folder, "stranger", files.ca)
    other = certify(files.folder, "router-beta-forged", certify(files.folder, "other-ca"))
    with files.access.open("a") as file:
        file.write('\n[[certificate]]\nname = "router-beta"\nrole = "router"\ntenants = ["beta"]\n')
    url = serve(
        file=str(files.access),
        tls_cert=str(files.server.cert),
        tls_key=str(files.server.key),
        tls_client_ca=str(files.ca.cert),
    )

    def client(one: Certificate | None, token: str = "") -> CatalogClient:
        more = (str(one.cert), str(one.key)) if one else ("", "")
        return Client(url, credentials=CatalogCredentials(token, str(files.ca.cert), *more))

    client(beta).wait_ready(WAIT_S)
    assert client(beta).namespaces() == []
    with pytest.raises(CatalogRefusedError, match="role may not"):
        client(beta).metrics()
    for nobody in (client(stranger), client(None)):
        with pytest.raises(CatalogRefusedError, match="does not know who asks"):
            nobody.namespaces()
    with pytest.raises(CatalogError, match=r"catalog\.client_cert"):
        client(other).namespaces()
    assert client(stranger, files.kept("ops", operator)).metrics()
    with pytest.raises(CatalogRefusedError, match="does not know"):  # a wrong token is not helped by a certificate
        client(beta, files.kept("wrong", "kvbm_wrong")).namespaces()


def test_a_certificate_is_replaced_while_it_serves_and_a_mismatched_one_keeps_the_old(
    files: Files, serve: Callable[..., str]
) -> None:
    files.token(OPERATOR)
    cert, key = files.folder / "live.pem", files.folder / "live-key.pem"
    first, second = certify(files.folder, "first", files.ca), certify(files.folder, "second", files.ca)

    put((first.cert, cert), (first.key, key))
    url = serve(file=str(files.access), tls_cert=str(cert), tls_key=str(key))
    operator = files.kept("ops", files.token(OPERATOR._replace(replace_s=0.0)))

    def served() -> tuple[str, str]:
        """What a new connection is shown, and what readiness says."""
        client = Client(url, credentials=CatalogCredentials(operator, str(files.ca.cert)))
        try:
            degraded = client.ready().degraded
            shown = client._transport.places[0].pool._get_conn()
            names = [value for part in shown.sock.getpeercert()["subject"] for _, value in part]
            return names[0], degraded
        finally:
            client.close()

    eventually(lambda: served()[0] == "first")
    with capture_logs() as logs:
        put((second.cert, cert))  # half of the pair
        for _ in range(3):
            name, degraded = served()
            assert name == "first"
            assert "do not belong together" in degraded
        put((second.key, key))
        assert served() == ("second", "")
        cert.write_text("garbage")
        assert served()[0] == "second"
    assert [line["event"] for line in logs if line["event"].startswith("catalog.certificate")] == [
        "catalog.certificate_kept",
        "catalog.certificate_read",
        "catalog.certificate_kept",
    ]


def test_who_signs_certificates_is_replaced_on_both_sides_while_it_serves(
    files: Files, serve: Callable[..., str]
) -> None:
    files.token(OPERATOR)
    with files.access.open("a") as file:
        file.write('\n[[certificate]]\nname = "router-beta"\nrole = "router"\ntenants = ["beta"]\n')
    (folder := files.folder / "second").mkdir()
    second = certify(folder, "second-ca")
    old, new = certify(files.folder, "router-beta", files.ca), certify(folder, "router-beta", second)
    new_server = certify(folder, "server", second)
    ca, cert, key, client_ca = (files.folder / name for name in ("live-ca", "live-cert", "live-key", "live-client-ca"))
    mine, my_key = files.folder / "mine", files.folder / "my-key"

    put((files.ca.cert, ca), (files.server.cert, cert), (files.server.key, key), (files.ca.cert, client_ca))
    put((old.cert, mine), (old.key, my_key))
    url = serve(file=str(files.access), tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(client_ca))
    credentials = CatalogCredentials("", str(ca), str(mine), str(my_key))
    client = Client(url, credentials=credentials)
    client.wait_ready(WAIT_S)
    assert client.namespaces() == []
    put((new_server.cert, cert), (new_server.key, key), (second.cert, client_ca))
    assert client.namespaces() == []  # its connection goes on
    with pytest.raises(CatalogError, match="do not trust each other"):
        Client(url, credentials=credentials).namespaces()
    put((second.cert, ca))
    with pytest.raises(CatalogError):  # the old certificate of this side is good no more
        client.namespaces()
    put((new.cert, mine), (new.key, my_key))
    assert client.namespaces() == []
    assert Client(url, credentials=credentials).namespaces() == []


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_token_once(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["token", "--access", str(files.access), "--name", "acme", "--role", "router"]
    assert catalog_main([*given, "--tenant", "acme", "--expires", "31536000"]) == 0
    token = capsys.readouterr().out.strip()
    assert Access(str(files.access)).caller(f"Bearer {token}", None) == ("acme", "router", frozenset({"acme"}))
    assert token not in files.access.read_text()
    for wrong, why in (
        (given, "--tenant T"),
        ([*given, "--tenant", "acme"], "--replace"),
        (["token", "--name", "x", "--role", "operator"], "catalog.access"),
    ):
        assert catalog_main(wrong) == 2
        assert why in capsys.readouterr().err


def test_the_command_puts_a_token_where_only_its_owner_reads_it(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    out = files.folder / "ops.token"
    out.write_text("an older one\n")
    out.chmod(0o644)  # as a shell's > makes it
    given = ["token", "--access", str(files.access), "--name", "ops", "--role", "operator", "--out", str(out)]
    assert catalog_main(given) == 0
    assert (capsys.readouterr().out, out.stat().st_mode & 0o777) == ("", 0o600)
    first = out.read_text()
    assert Access(str(files.access)).caller(f"Bearer {first.strip()}", None) == ("ops", "operator", None)
    assert catalog_main(given) == 2  # the name has one
    assert out.read_text() == first
    assert catalog_main([*given, "--replace", "60"]) == 0
    access = Access(str(files.access))
    assert [access.caller(f"Bearer {one.strip()}", None) is None for one in (first, out.read_text())] == [False, False]
    assert first != out.read_text()


def test_no_token_is_put_where_another_user_reads_it(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = files.folder / "ops.token"
    out.write_text("theirs\n")
    give_away(out, monkeypatch)
    given = ["token", "--access", str(files.access), "--name", "ops", "--role", "operator", "--out", str(out)]
    assert catalog_main(given) == 2
    assert "belongs to user" in capsys.readouterr().err
    assert out.read_text() == "theirs\n"
    assert not files.access.exists()  # nothing was made that would have to be taken back
    link = files.folder / "link"
    link.symlink_to(out)
    assert catalog_main([*given[:-1], str(link)]) == 0  # what it leads to is left as it was
    assert out.read_text() == "theirs\n"
    assert not link.is_symlink()


def test_a_secret_in_the_place_of_another_users_file_is_ours_alone(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    gave: list[int] = []
    give = os.fchown

    def fchown(fd: int, user: int, group: int) -> None:
        gave.append(user)
        if os.geteuid() == 0:  # nobody else can give a file away
            give(fd, user, group)

    monkeypatch.setattr(os, "fchown", fchown)
    for is_secret in (True, False):
        out = files.folder / "out"
        out.write_text("theirs\n")
        out.chmod(0o644)
        if os.geteuid() == 0:
            os.chown(out, 54_321, 54_321)
        other = out.stat().st_uid
        write_out(out, "ours\n", is_secret)
        assert (out.read_text(), out.stat().st_uid, out.stat().st_mode & 0o777) == (
            "ours\n",
            os.geteuid() if is_secret else other,
            0o600 if is_secret else 0o644,
        )
        assert gave == ([] if is_secret else [other])


def test_no_key_is_put_where_another_user_reads_it(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.folder / "keys.toml"
    add_key(path, "acme", "1")
    before = path.read_text()
    give_away(path, monkeypatch)
    with pytest.raises(ConfigError, match="belongs to user"):
        add_key(path, "acme", "2")
    assert path.read_text() == before


def test_who_may_read_a_folder_keeps_no_command_from_ending(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm.files, "LOCK_WAIT_S", 0.0)
    other = os.open(files.folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_SH)
        for work in (
            lambda: files.token(OPERATOR),
            lambda: add_key(files.folder / "keys.toml", "acme", "1"),
            lambda: print_accounts(files.folder, "prod", [(Role.INSTANCE, "a")], KeyChange(), time.time()),
        ):
            with pytest.raises(ConfigError, match=r"locked .* lslocks .* chmod"):
                work()
    finally:
        os.close(other)
    files.token(OPERATOR)
