"""A cluster as `docs/operate.md` secures it: TLS, an account for everybody, keys and certificates that change under
load.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbm.assembly import NATIVE, open_manager, run_gc
from kvbm.config import Settings, load_settings
from kvbm.config.settings import CatalogSettings
from kvbm.core.errors import StreamError
from kvbm.core.ids import NO_PARENT, Epoch, Namespace, Tier
from kvbm.janitor import Report
from kvbm.locate.http import CatalogClient
from kvbm.manager.owned_hbm import Manager
from kvbm.pools.base import Proof
from kvbm.pools.stores.memory import MemoryStore
from kvbm.streams.base import Position
from tests.certificates import Certificate, certify
from tests.eventually import eventually
from tests.janitors import Skipping
from tests.managers import BLOCK_BYTES, hashes_of, rows_of
from tests.object_pools import memory_objects
from tests.reloading import ReloadingServer
from tests.servers import free_port, start_process, stop_process

ROOT = Path(__file__).parents[2]
CLUSTER = "prod"
TENANTS = {
    "acme": Namespace(model="secured", revision="r1", block_tokens=16, tenant="acme"),
    "globex": Namespace(model="secured", revision="r1", block_tokens=16, tenant="globex"),
}
DEPTH, K = 8, 4
ENGINES = ("gpu-0", "gpu-1", "gpu-2", "gpu-3")
WAIT_S = 120.0


def kvbm(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """One of the commands, as people run it."""
    ran = subprocess.run(
        [sys.executable, "-m", "kvbm", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * WAIT_S,
        check=False,
    )
    assert ran.returncode == code, (ran.returncode, ran.stdout, ran.stderr)
    return ran


DRIVER = """
import contextlib, io, json, sys
from kvbm.cli import main
ends = []
for command in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    ends.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(ends))
"""


def kvbm_each(*commands: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """Several commands, one after the other in one process: loading the modules is what costs."""
    ran = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(commands)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_S,
        check=True,
    )
    ended = json.loads(ran.stdout)
    return [subprocess.CompletedProcess(one, *end) for one, end in zip(commands, ended, strict=True)]


class Secured:
    """The server, its keys and certificates, and settings of whoever takes part."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys, self.trusted = folder, folder / "keys", folder / "trusted.pem"
        self.ca = certify(folder, "ca-1")
        self.certificate = folder / "server.pem", folder / "server-key.pem"
        self.trust(self.ca)
        self.show(certify(folder, "server-1", self.ca))
        self.named = [f"--instance={name}" for name in ENGINES] + [
            "--janitor=gc-0",
            "--replay=desk-0",
            "--operator=ops",
        ]
        self.server = ReloadingServer(folder / "nats", self.tls() + self.accounts())
        self.url = self.server.url.replace("nats://", "tls://")

    def tls(self) -> str:
        cert, key = map(str, self.certificate)
        return f"tls {{ cert_file: {json.dumps(cert)}, key_file: {json.dumps(key)} }}\n"

    def accounts(self, *changes: str) -> str:
        return kvbm("nats-permissions", "--cluster", CLUSTER, "--keys", str(self.keys), *self.named, *changes).stdout

    def trust(self, *issuers: Certificate) -> None:
        """What clients trust from their next connection on."""
        _replace(self.trusted, b"".join(one.cert.read_bytes() for one in issuers))

    def show(self, made: Certificate) -> None:
        """What the server shows, once it reloads its configuration."""
        for path, source in zip(self.certificate, (made.cert, made.key), strict=True):
            _replace(path, source.read_bytes())

    def reload(self, *changes: str) -> None:
        self.server.reload(self.tls() + self.accounts(*changes))

    def nats(self, stem: str) -> dict[str, object]:
        return {
            "nats.url": self.url,
            "nats.nkey_seed": str(self.keys / f"{stem}.nk"),
            "nats.tls_ca": str(self.trusted),
            "nats.timeout_s": WAIT_S,
            "nats.heartbeat_s": 0.2,
            "instance.cluster": CLUSTER,
        }

    def settings(self, stem: str, **flags: object) -> Settings:
        return load_settings(flags=self.nats(stem) | {key.replace("__", "."): value for key, value in flags.items()})

    def issuer_shown(self) -> str:
        """Who has signed the certificate that a new connection is shown."""
        port = int(self.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as plain:
            plain.recv(65536)  # INFO
            context = ssl.create_default_context(cafile=str(self.trusted))
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                issuer = (secure.getpeercert() or {})["issuer"]
                names = dict(pair for part in issuer for pair in part)  # type: ignore[misc]
        return str(names["commonName"])


def _replace(path: Path, data: bytes) -> None:
    """In one step, so that nobody reads half of it."""
    path.with_suffix(".new").write_bytes(data)
    os.replace(path.with_suffix(".new"), path)


# -- engines -----------------------------------------------------------------------------------------------------------


class Engine:
    """A manager, and a thread that serves it prompts of both tenants until it is told to end."""

    def __init__(
        self, secured: Secured, name: str, store: MemoryStore, number: int, stem: str = "", **flags: object
    ) -> None:
        settings = secured.settings(
            stem or f"instance-{name}",
            instance__id=name,
            instance__data_dir=str(secured.folder / name),
            pools__hbm__slots=64,
            pools__hbm__device="cpu",
            pools__host__slots=64,
            pools__object__look_s=1.0,
            **flags,
        )
        objects = memory_objects(BLOCK_BYTES, K, store, deadline_s=WAIT_S)
        self.manager = open_manager(settings, list(TENANTS.values()), BLOCK_BYTES, object_pool=objects)
        self.served = 0
        self.error: BaseException | None = None
        self._number = number
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                tenant = list(TENANTS)[self.served % 2]
                serve(self.manager, TENANTS[tenant], (self._number << 20) + self.served)
                self.served += 1
                time.sleep(0.02)
        except BaseException as error:
            self.error = error
            raise

    def goes_on(self) -> bool:
        """Whether the stream has taken more since the call began."""
        before = Position(self.manager.epoch, self.manager.applied())
        eventually(lambda: self.manager.published() > before, "nothing more is published", WAIT_S, self.manager.stats)
        return self.error is None

    def end(self) -> None:
        self._end.set()
        self._thread.join(WAIT_S)
        assert self.error is None

    def close(self) -> None:
        self._end.set()
        self.manager.close()


def serve(manager: Manager, namespace: Namespace, prompt: int) -> None:
    """One prompt, none of whose blocks is known, as an engine computes it."""
    hashes = hashes_of(prompt, DEPTH)
    slots = None
    while slots is None:  # offloads may pin some for a moment
        slots = manager.allocate(DEPTH)
    rows = rows_of(hashes)
    manager.pools.slots[Tier.HBM].write(slots, rows, Proof(namespace.id, Epoch(1), hashes, NATIVE.checksums(rows)))
    manager.unpin(manager.create(namespace.id, NO_PARENT, 0, hashes, slots))


# -- the catalog, and who asks it --------------------------------------------------------------------------------------

# Who asks is known where the catalog has callers and TLS. Where it has none, the cluster here is asked over plain HTTP.
HAS_ACCESS = "access" in {field.name for field in msgspec.structs.fields(CatalogSettings)}
CALLERS = {"router-acme": ("router", "--tenant=acme"), "router-globex": ("router", "--tenant=globex")} | {
    "engine": ("router", "--all-tenants"),
    "operator": ("operator",),
}


@contextmanager
def catalog(secured: Secured, database: str) -> Iterator[str]:
    """`kvbm-catalog serve` as a process; gives where it answers."""
    port = free_port()
    flags = (
        secured.nats("catalog")
        | serving_flags(secured)
        | {
            "instance.data_dir": str(secured.folder / "catalog"),
            "catalog.database": database,
            "catalog.listen": f"127.0.0.1:{port}",
        }
    )
    command = [sys.executable, "-m", "kvbm", "catalog", "serve"]
    command += [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
    process = start_process(command, secured.folder / "catalog.log", cwd=ROOT)
    try:
        yield f"{'https' if HAS_ACCESS else 'http'}://127.0.0.1:{port}"
    finally:
        stop_process(process)


def serving_flags(secured: Secured) -> dict[str, object]:
    """Settings by which the catalog answers over HTTPS, and those alone who have a token; makes the tokens."""
    if not HAS_ACCESS:
        return {}
    access, made = secured.folder / "access.toml", certify(secured.folder, "catalog", secured.ca)
    commands = [
        [
            "catalog",
            "token",
            "--access",
            str(access),
            "--name",
            name,
            "--role",
            role,
            *more,
            "--out",
            str(secured.folder / f"{name}.token"),
        ]
        for name, (role, *more) in CALLERS.items()
    ]
    assert [ran.returncode for ran in kvbm_each(*commands)] == [0] * len(CALLERS)
    return {"catalog.access": str(access), "catalog.tls_cert": str(made.cert), "catalog.tls_key": str(made.key)}


def asking_flags(secured: Secured, name: str) -> dict[str, object]:
    """Settings by which somebody asks the catalog."""
    if not HAS_ACCESS:
        return {}
    return {"catalog.token": str(secured.folder / f"{name}.token"), "catalog.tls_ca": str(secured.ca.cert)}


def client_of(secured: Secured, url: str, name: str) -> CatalogClient:
    """A client with a caller's token."""
    if not HAS_ACCESS:
        return CatalogClient(url, WAIT_S)
    from kvbm.assembly import catalog_credentials

    settings = load_settings(flags=asking_flags(secured, name))
    options: dict[str, Any] = {"credentials": catalog_credentials(settings)}
    return CatalogClient(url, WAIT_S, **options)


def knows_nothing(router: CatalogClient, namespace: Namespace, prompt: int) -> bool:
    """Whether a router is told that nobody holds a prompt."""
    answer = router.lookup(namespace, hashes_of(prompt, DEPTH))
    return not any(one.depth for one in (*answer.instances, *answer.pools))


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    made = Secured(tmp_path)
    yield made
    made.server.stop()


def test_a_secured_cluster_goes_on_while_keys_and_certificates_change_and_loses_nothing(secured: Secured) -> None:
    store = MemoryStore()
    database = f"sqlite+aiosqlite:///{secured.folder / 'catalog.db'}"
    with ExitStack() as opened:
        url = opened.enter_context(catalog(secured, database))
        routers = {tenant: client_of(secured, url, f"router-{tenant}") for tenant in TENANTS}
        operator = client_of(secured, url, "operator")
        for client in (*routers.values(), operator):
            opened.callback(client.close)
        operator.wait_ready(WAIT_S)
        engines: dict[str, Engine] = {}

        def start(name: str) -> None:
            engines[name] = Engine(
                secured, name, store, len(engines), **asking_flags(secured, "engine"), **{"catalog.url": url}
            )
            opened.callback(engines[name].close)

        for name in ENGINES:
            start(name)
        all_go_on(engines)
        for tenant, router in routers.items():
            seen(router, TENANTS[tenant], prompt_of(engines["gpu-1"], tenant))
        if HAS_ACCESS:
            assert knows_nothing(routers["acme"], TENANTS["globex"], prompt_of(engines["gpu-1"], "globex"))

        # an instance is added: one reload, no restart
        secured.named.append("--instance=gpu-4")
        secured.reload()
        start("gpu-4")
        all_go_on(engines)

        # the server's certificate, and who has signed it: clients trust both, the server shows the new one, the old is
        # trusted no more
        issuer = certify(secured.folder, "ca-2")
        secured.trust(secured.ca, issuer)
        secured.show(certify(secured.folder, "server-2", issuer))
        secured.reload()
        assert secured.issuer_shown() == "ca-2"
        secured.trust(issuer)
        all_go_on(engines)

        # everybody's key; with the old one each connection ends, so that each is made anew with the new key and
        # certificate
        stems = ["catalog", *(f"instance-{name}" for name in engines)]
        old = {stem: (secured.keys / f"{stem}.nk").read_bytes() for stem in stems}
        secured.reload(*(f"--renew={stem}" for stem in stems))
        all_go_on(engines)
        secured.reload(*(f"--retire={stem}" for stem in stems))
        assert all((secured.keys / f"{stem}.nk").read_bytes() != seed for stem, seed in old.items())
        all_go_on(engines)

        assert gc(secured, store, database).pool
        said = refusal(lambda: gc(secured, store, database, name="gc-9"))
        assert "gc-9" in said and "permissions violation" in said and "--janitor gc-9" in said
        for engine in engines.values():
            engine.end()
            assert engine.manager.settle(WAIT_S)
        applied = {name: engine.manager.applied() for name, engine in engines.items()}
        for name, engine in engines.items():
            eventually(
                lambda engine=engine, name=name: engine.manager.published().offset >= applied[name],
                "not all is published",
                WAIT_S,  # type: ignore[misc]
            )
        for tenant, router in routers.items():
            for engine in engines.values():
                seen(router, TENANTS[tenant], prompt_of(engine, tenant))
        digests_agree(operator, engines)
        verified, told, counted, one, shown, without, of_instance = kvbm_each(
            replay(secured, "verify", "--json", str(secured.folder / "verify.json")),
            replay(secured, "state", "--json", "-"),
            replay(secured, "stat"),
            replay(secured, "state", "--instance", "gpu-4"),
            replay(secured, "cat", "--limit", "5"),
            replay(secured, "verify", stem=""),
            replay(secured, "verify", stem="instance-gpu-0"),
        )
        assert [ran.returncode for ran in (verified, told, counted, one, shown, without, of_instance)] == [0] * 5 + [
            2
        ] * 2
        assert ", 0 findings" in verified.stdout and "verified: 6 instances" in verified.stdout, verified.stdout
        states = json.loads(told.stdout)["instances"]
        on_stream = {state["instance"]: (state["epoch"], state["offset"], int(state["digest"], 16)) for state in states}
        for name, engine in engines.items():  # each event that was decided, and the epoch it began with
            assert on_stream[name] == (1, *engine.manager.digest())
            assert on_stream[name][1] >= applied[name] > engine.served
        assert counted.stdout and one.stdout
        assert len(shown.stdout.splitlines()) == 5
        assert "the key" in without.stderr
        assert (
            "permissions violation" in of_instance.stderr
            and "_inbox." in of_instance.stderr
            and "--replay NAME" in of_instance.stderr
        )


def refusal(attempt: Callable[[], object]) -> str:
    with pytest.raises(StreamError) as refused:
        attempt()
    return str(refused.value)


def test_an_instance_whose_key_is_anothers_serves_and_says_what_is_missing(secured: Secured) -> None:
    store = MemoryStore()
    engine = Engine(secured, "gpu-9", store, 9, "instance-gpu-0")
    try:
        said = eventually(engine.manager.trouble, "it sees no trouble", WAIT_S)
        assert "permissions violation" in said and "--instance gpu-9" in said
        served = engine.served
        eventually(lambda: engine.served > served + 10, "it serves no more", WAIT_S)
        engine.end()
        engine.manager.close(0.1)  # what it says is not taken
    finally:
        engine.close()


def all_go_on(engines: dict[str, Engine]) -> None:
    assert all(engine.goes_on() for engine in engines.values())


def prompt_of(engine: Engine, tenant: str) -> int:
    """The last prompt of a tenant that an engine has served."""
    last = engine.served - 1
    return (engine._number << 20) + last - (last % 2 != list(TENANTS).index(tenant))


def seen(router: CatalogClient, namespace: Namespace, prompt: int) -> None:
    """The router is told who holds a prompt, or that the object pool does."""
    hashes = hashes_of(prompt, DEPTH)

    def found() -> bool:
        answer = router.lookup(namespace, hashes)
        return any(one.depth for one in (*answer.instances, *answer.pools))

    eventually(found, "the catalog knows nothing of a prompt", WAIT_S)


def digests_agree(operator: CatalogClient, engines: dict[str, Engine]) -> None:
    def agree(name: str, manager: Manager) -> bool:
        summary = operator.instance(name)
        return summary is not None and int(summary.digest, 16) == manager.digest()[1]

    for name, engine in engines.items():
        eventually(partial(agree, name, engine.manager), f"{name} differs", WAIT_S)


def gc(secured: Secured, store: MemoryStore, database: str, name: str = "gc-0", stem: str = "janitor-gc-0") -> Report:
    reports: list[Report] = []
    settings = secured.settings(
        stem,
        gc__id=name,
        gc__ttl_s=0.0,
        gc__young_s=0.0,
        gc__grace_s=3 * WAIT_S,
        gc__skew_s=WAIT_S,
        instance__data_dir=str(secured.folder / "gc"),
        catalog__database=database,
        pools__object__look_s=1.0,
        pools__object__timeout_s=WAIT_S,
    )
    assert run_gc(settings, False, reports.append, lambda: store, Skipping().clocks()) == 0
    return reports[0]


def replay(secured: Secured, command: str, *more: str, stem: str = "replay-desk-0") -> list[str]:
    """The words of `kvbm-replay` with a key, or with none."""
    flags = secured.nats(stem)
    if not stem:
        del flags["nats.nkey_seed"]
    sets = [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
    return ["replay", command, secured.url, "--timeout", f"{WAIT_S:g}", *more, *sets]


def test_a_catalog_with_anothers_key_ends_with_what_is_missing(secured: Secured) -> None:
    flags = secured.nats("instance-gpu-0") | {"instance.data_dir": str(secured.folder / "catalog")}
    sets = [word for key, value in flags.items() for word in ("--set", f"{key}={value}")]
    said = kvbm("catalog", "serve", *sets, code=2).stderr
    assert "permissions violation" in said and "kvbm nats-permissions --cluster prod" in said
