"""The whole line once, on embedded defaults: real KV from a running model through tiers, events, catalog and replay.

Two small engines in processes of their own, a nats-server, the catalog on SQLite and a local object store. One engine
reads a prompt's blocks from the other's HOST. Dialogues with shared system prompts are routed by the catalog; one
engine is killed in the middle and comes back. At the end everything is recomputed without reuse, and every event,
digest and token is compared.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbm.assembly import NATIVE, NATIVE_FOLD
from kvbm.core.errors import CatalogError, ConfigError
from kvbm.core.ids import InstanceId, Tier
from kvbm.demo.engine.worker import WorkerSettings
from kvbm.demo.engine_process import EngineProcess
from kvbm.files import make_folder
from kvbm.locate.http import CatalogClient
from kvbm.progress import bars_are_shown
from kvbm.replay.opening import open_source
from kvbm.replay.verify import Verified, verify
from kvbm.reports import check_report_path, write_report
from kvbm.streams.server import EmbeddedServer
from kvbm.workload.catalog_view import counter, wait_applied, wait_live
from kvbm.workload.generator import Dialogue, generate_dialogues
from kvbm.workload.processes import (
    ProcessError,
    machine,
    start_catalog,
    start_object_store,
)

BUCKET = "kvbm-demo"
ENGINES = ("engine-a", "engine-b")
KILLED, LENDER = ENGINES
EXCHANGE = {  # who is killed lends nothing: reads of a peer that dies fail, and no copy may fail here
    KILLED: {"transport.fetch": "true"},
    LENDER: {"transport.listen": "host"},
}
DIALOGUES, TURNS, NEW_TOKENS, AT_ONCE = 12, 4, 12, 4
SYSTEM_TOKENS, USER_TOKENS = 256, 100
POOL_SLOTS = {"pools.hbm.slots": 112, "pools.host.slots": 144, "pools.nvme.slots": 224}
PREFIX_TOKENS, PREFIX_REPEATS = 1024, 5
PEER_TRIES = 3  # on a busy machine an engine may not wait for the catalog's answer, and computes
RECOVERY_REQUESTS = 2
ANSWER_WAIT_S = 120.0  # for one answer, and for a part to start or to come to rest; a busy machine is no failure
RECOVERY_WAIT_S = 5 * ANSWER_WAIT_S
# What lies in the object store is read, however long the catalog and the store take: else a busy machine would compute
# it.
ONBOARDING = {"onboard.locate_s": ANSWER_WAIT_S / 4, "onboard.wait_s": ANSWER_WAIT_S / 2}


class DemoAnswer(NamedTuple):
    """One request of the workload and what came of it."""

    id: str
    engine: str
    tokens: list[int]
    new_tokens: list[int]
    ttft_s: float
    hits: dict[str, int]
    prompt_blocks: int
    smallest_margin: float


class DemoReport(msgspec.Struct, kw_only=True):
    """What `kvbm demo --json` writes. Times in seconds, hits in blocks."""

    requests: int = 0
    tokens_identical: bool = False
    tokens_compared: int = 0
    smallest_logit_margin: float = 0.0
    prompt_blocks: int = 0
    hits_by_tier: dict[str, int] = {}
    peer_blocks: int = 0
    peer_prompt_blocks: int = 0
    peer_tokens_identical: bool = False
    ttft_recompute_s: float = 0.0
    ttft_reuse_s: float = 0.0
    ttft_ratio: float = 0.0
    events_published: int = 0
    events_applied: int = 0
    gaps: int = -1
    digests: dict[str, dict[str, str]] = {}
    digests_equal: bool = False
    killed_and_recovered: bool = False
    recovered_blocks: int = 0
    resubmitted_requests: int = 0
    verified_reads: int = 0
    corrupt_blocks: int = 0
    failed_copies: int = 0
    replay_verified: bool = False
    replay_verdicts: dict[str, str] = {}
    machine: str = ""
    elapsed_s: float = 0.0

    def failures(self) -> list[str]:
        """The checks that failed, in words."""
        checks = {
            "not every request was answered": self.requests == DIALOGUES * TURNS,
            "tokens differ from those of a recomputation": self.tokens_identical
            and self.tokens_compared >= self.requests,
            "a tier served no hit": all(self.hits_by_tier.get(tier.name, 0) for tier in Tier),
            "not every block of a prompt was read from the other engine's HOST": self.peer_blocks
            == self.peer_prompt_blocks
            > 0,
            "tokens after blocks of the other engine differ from those it computed": self.peer_tokens_identical,
            "reuse was not faster than recomputing": self.ttft_ratio > 1,
            "events applied differ from events published": self.events_applied == self.events_published > 0,
            "there were gaps": self.gaps == 0,
            "digests of instances and catalog differ": self.digests_equal,
            "the killed engine did not recover": self.killed_and_recovered and self.recovered_blocks > 0,
            "no read was verified": self.verified_reads > 0,
            "a block was corrupt or a copy failed": not self.corrupt_blocks and not self.failed_copies,
            "replay found faults": self.replay_verified,
        }
        return [what for what, good in checks.items() if not good]


class Demo:
    """One run. `folder` gets every store and log."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.report = DemoReport(machine=machine())
        self._worker = WorkerSettings()
        self._namespace = self._worker.namespace()
        self._opened = ExitStack()
        self._engines: dict[str, EngineProcess] = {}
        self._down: set[str] = set()
        self._answers: list[DemoAnswer] = []
        self._hits = {tier.name: 0 for tier in Tier}  # of every request that may reuse, the measurement's included
        self._guard = threading.Lock()
        self._killed = threading.Event()
        self._stored: list[int] = []  # the prompt of `_store_prompt`, and what it is answered
        self._stored_tokens: list[int] = []
        self._stream_url = ""
        self._object_url = ""
        self._catalog: CatalogClient | None = None

    def run(self, step: Callable[[str], None], advance: Callable[[int, int], None]) -> DemoReport:
        """Everything, in order.

        Args:
            step: told what begins.
            advance: told (done, of) within a step.
        Raises: KvbmError: a part did not start or did not answer.
        """
        began = time.monotonic()
        with self._opened:
            step("starting nats-server, object store, catalog and two engines")
            self._start_parts()
            step("a prompt of one engine, its blocks read by the other")
            self._read_from_peer()
            self._store_prompt()
            step("dialogues, routed by the catalog; one engine is killed on the way")
            self._run_dialogues(advance)
            step("time to first token, recomputed and from HOST")
            self._measure_ttft(advance)
            step("recomputing every answer without reuse")
            self._compare_tokens(advance)
            step("comparing engines, stream, catalog and replay")
            self._verify()
        self.report.elapsed_s = round(time.monotonic() - began, 1)
        return self.report

    # -- parts --------------------------------------------------------------------------------------------------------

    def _start_parts(self) -> None:
        logs = self.folder / "logs"
        server = EmbeddedServer.start(self.folder / "nats")
        self._opened.callback(server.stop)
        self._stream_url = server.url
        store, self._object_url = start_object_store(logs)
        self._opened.callback(store.stop)
        self._make_bucket()
        self._catalog = start_catalog(self.folder, self._stream_url, self._opened)
        for name in ENGINES:
            self._start_engine(name, EXCHANGE[name])
        for name in ENGINES:
            self._engines[name].expect(ANSWER_WAIT_S, "did not start")
        wait_live(self._catalog, ENGINES, ANSWER_WAIT_S)

    def _make_bucket(self) -> None:
        import boto3
        from botocore.config import Config

        client = boto3.client(
            "s3",
            endpoint_url=self._object_url,
            region_name="us-east-1",
            aws_access_key_id="demo",
            aws_secret_access_key="demo",
            config=Config(proxies={}),
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()

    def _start_engine(self, name: str, exchange: Mapping[str, object]) -> None:
        assert self._catalog is not None
        flags: dict[str, object] = {
            "instance.id": name,
            "instance.data_dir": self.folder,
            "nats.url": self._stream_url,
            "catalog.url": self._catalog.url,
            **exchange,
            "pools.object.url": f"s3://{BUCKET}/blocks",
            "pools.object.endpoint": self._object_url,
            "pools.object.region": "us-east-1",
            **POOL_SLOTS,
            **ONBOARDING,
        }
        credentials = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
        engine = EngineProcess(name, flags, self.folder / "logs", credentials)
        self._engines[name] = engine
        self._opened.callback(engine.stop)

    # -- workload -----------------------------------------------------------------------------------------------------

    def _read_from_peer(self) -> None:
        """One engine computes a prompt that nobody has; the other is sent it once the catalog knows that the blocks are
        in HOST there.

        All its blocks are one lot, so they are read from one place: the object store may have them too by then, and is
        slower.
        """
        rng = np.random.default_rng(5)
        for number in range(PEER_TRIES):
            prompt = [int(token) for token in rng.integers(0, self._worker.shape.vocab, PREFIX_TOKENS + 1)]
            computed = self._submit(LENDER, f"lent{number}", prompt, NEW_TOKENS, reuse=True)
            self._wait_lent(prompt)
            before = self._engines[KILLED].ask(op="status")["peer_hits"]
            read = self._submit(KILLED, f"borrowed{number}", prompt, NEW_TOKENS, reuse=True)
            self.report.peer_blocks = self._engines[KILLED].ask(op="status")["peer_hits"] - before
            self.report.peer_prompt_blocks = read["prompt_blocks"]
            is_computed = not computed["failed"] and not sum(computed["hits"].values())
            self.report.peer_tokens_identical = is_computed and read["tokens"] == computed["tokens"]
            if self.report.peer_blocks == self.report.peer_prompt_blocks:
                return

    def _store_prompt(self) -> None:
        """A prompt that nobody has, twice: the second time HBM has its blocks, and then the object store.

        Nothing else runs meanwhile.
        """
        vocabulary = self._worker.shape.vocab
        self._stored = [int(token) for token in np.random.default_rng(13).integers(0, vocabulary, PREFIX_TOKENS + 1)]
        self._stored_tokens = self._submit(LENDER, "stored", self._stored, NEW_TOKENS, reuse=True)["tokens"]
        self._expect_whole(LENDER, "HBM")
        self._settle(LENDER)

    def _expect_whole(self, name: str, tier: str) -> None:
        """Ask an engine for the stored prompt.

        Raises ProcessError: its blocks are not all of this tier, or its tokens differ.
        """
        event = self._submit(name, f"stored-{name}-{tier}", self._stored, NEW_TOKENS, reuse=True)
        if event["failed"] or event["hits"].get(tier, 0) != PREFIX_TOKENS // self._worker.block_tokens:
            raise ProcessError(f"{name} should have found the whole prefix in {tier}; it found {event['hits']}")
        if event["tokens"] != self._stored_tokens:
            raise ProcessError(f"{name} answered a prompt from {tier} otherwise than {LENDER}, which computed it")

    def _wait_lent(self, prompt: list[int]) -> None:
        """Wait until the catalog says that all blocks of a prompt are lent. Raises ProcessError: not in time."""
        assert self._catalog is not None
        hashes = NATIVE.sequence_hashes(prompt, self._worker.block_tokens, self._namespace.root())
        wanted = (LENDER, len(prompt) // self._worker.block_tokens)
        deadline = time.monotonic() + ANSWER_WAIT_S
        while time.monotonic() < deadline:
            if wanted in [(one.instance, one.depth) for one in self._catalog.find(self._namespace, hashes).peers]:
                return
            time.sleep(0.02)
        raise self._engines[LENDER].failure(f"did not lend what it computed within {ANSWER_WAIT_S:g} s")

    def _run_dialogues(self, advance: Callable[[int, int], None]) -> None:
        dialogues = generate_dialogues(
            7,
            DIALOGUES,
            TURNS,
            self._worker.shape.vocab,
            system_prompts=3,
            system_prompt_tokens=SYSTEM_TOKENS,
            user_tokens=USER_TOKENS,
        )
        waiting: queue.SimpleQueue[tuple[int, Dialogue]] = queue.SimpleQueue()
        for numbered in enumerate(dialogues):
            waiting.put(numbered)
        errors: list[BaseException] = []
        threads = [threading.Thread(target=self._serve, args=(waiting, errors), daemon=True) for _ in range(AT_ONCE)]
        for thread in threads:
            thread.start()
        total = DIALOGUES * TURNS
        recovery: threading.Thread | None = None
        while any(thread.is_alive() for thread in threads):
            if errors:
                raise errors[0]
            advance(len(self._answers), total)
            if len(self._answers) >= total // 2 and not self._killed.is_set():
                recovery = self._kill_and_restart(KILLED, errors)
            time.sleep(0.05)
        if recovery is not None:
            recovery.join(RECOVERY_WAIT_S)
        if errors:
            raise errors[0]
        if recovery is not None and recovery.is_alive():
            raise ProcessError(f"{KILLED} has not served again within {RECOVERY_WAIT_S:g} s")
        self.report.requests = len(self._answers)

    def _serve(self, waiting: queue.SimpleQueue[tuple[int, Dialogue]], errors: list[BaseException]) -> None:
        """Hold dialogues, one after the other, until none waits."""
        try:
            while True:
                try:
                    number, dialogue = waiting.get_nowait()
                except queue.Empty:
                    return
                history = list(dialogue.system_tokens)
                for turn, question in enumerate(dialogue.user_turns):
                    history += question
                    answer = self._answer(f"d{number}t{turn}", list(history))
                    history += answer.new_tokens
                    with self._guard:
                        self._answers.append(answer)
        except (ProcessError, CatalogError) as error:
            errors.append(error)

    def _answer(self, request_id: str, tokens: list[int]) -> DemoAnswer:
        """Route one request and wait for its tokens; sent again when its engine dies."""
        deadline = time.monotonic() + ANSWER_WAIT_S
        while time.monotonic() < deadline:
            name = self._route(tokens)
            event = self._submit(name, request_id, tokens, NEW_TOKENS, reuse=True)
            if not event["failed"]:
                return DemoAnswer(
                    request_id,
                    name,
                    tokens,
                    event["tokens"],
                    event["ttft_s"],
                    event["hits"],
                    event["prompt_blocks"],
                    event["smallest_margin"],
                )
            with self._guard:
                self.report.resubmitted_requests += 1
            time.sleep(0.05)
        raise ProcessError(
            f"request {request_id} got no answer within {ANSWER_WAIT_S:g} s; logs: {self.folder / 'logs'}"
        )

    def _route(self, tokens: list[int]) -> str:
        assert self._catalog is not None
        hashes = NATIVE.sequence_hashes(tokens, self._worker.block_tokens, self._namespace.root())
        ranked = self._catalog.route(self._namespace.id, hashes, len(tokens)).ranked
        up = [cost.instance for cost in ranked if cost.instance not in self._down]
        return up[0] if up else next(name for name in ENGINES if name not in self._down)

    def _submit(self, name: str, request_id: str, tokens: list[int], new_tokens: int, reuse: bool) -> dict[str, Any]:
        done: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._engines[name].submit(request_id, tokens, new_tokens, reuse, done.put)
        try:
            event = done.get(timeout=ANSWER_WAIT_S)
        except queue.Empty:
            raise self._engines[name].failure(f"did not answer request {request_id}") from None
        if reuse and not event["failed"]:
            with self._guard:
                self.report.prompt_blocks += event["prompt_blocks"]
                for tier, count in event["hits"].items():
                    self._hits[tier] += count
        return event

    def _kill_and_restart(self, name: str, errors: list[BaseException]) -> threading.Thread:
        """kill -9 at work, the other engine serves alone, and what was asked last here, too; then a new process on the
        same folder.

        What it had answered by then is in its NVME pool and its events are known, so that it is found again whenever
        the kill comes.
        """
        self._killed.set()
        with self._guard:
            before = [answer for answer in self._answers if answer.engine == name][-RECOVERY_REQUESTS:]
        self._settle(name)
        self._down.add(name)
        self._engines[name].kill()

        def restart() -> None:
            try:
                is_taken_over = self._ask_again(LENDER, "taken-over", before) is not None
                self._start_engine(name, {})  # it reads from the object store what it would read from its peer
                ready = self._engines[name].expect(ANSWER_WAIT_S, "did not come back")
                self.report.recovered_blocks = ready["recovered"]["NVME"]
                self._expect_whole(
                    name, "OBJECT"
                )  # as its first prompt: it reads all that is held until it knows how quickly it computes
                hits = self._ask_again(name, "recovered", before)
                is_back = ready["epoch"] == 2 and hits is not None and hits.get("NVME", 0) > 0
                self.report.killed_and_recovered = is_taken_over and is_back
                self._down.discard(name)
            except ProcessError as error:
                errors.append(error)

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        return thread

    def _ask_again(self, name: str, what: str, before: list[DemoAnswer]) -> dict[str, int] | None:
        """Ask an engine what was asked last of the one that was killed: blocks found, by tier;

        None: an answer was another.
        """
        found: dict[str, int] = {}
        for answer in before:
            event = self._submit(name, f"{what}-{answer.id}", answer.tokens, NEW_TOKENS, reuse=True)
            if event["failed"] or event["tokens"] != answer.new_tokens:
                return None
            for tier, count in event["hits"].items():
                found[tier] = found.get(tier, 0) + count
        return found

    def _settle(self, name: str) -> None:
        """Wait until what an engine has computed lies in its colder tiers, and the catalog knows it.

        Raises ProcessError, CatalogError.
        """
        assert self._catalog is not None
        engine = self._engines[name]
        deadline = time.monotonic() + ANSWER_WAIT_S
        while not engine.ask(ANSWER_WAIT_S, op="settle")["settled"]:
            if time.monotonic() > deadline:
                raise engine.failure(f"still copies blocks after {ANSWER_WAIT_S:g} s")
        settled = engine.ask(ANSWER_WAIT_S, op="status")
        wait_applied(self._catalog, [(InstanceId(name), settled["epoch"], settled["applied"])], ANSWER_WAIT_S)

    # -- measurement --------------------------------------------------------------------------------------------------

    def _measure_ttft(self, advance: Callable[[int, int], None]) -> None:
        """The same prompts on the same engine: computed whole, and with their prefix in HOST. Medians of pairs."""
        rng = np.random.default_rng(11)
        engine = LENDER
        recompute: list[float] = []
        reuse: list[float] = []
        for index in range(PREFIX_REPEATS):
            prompt = [int(token) for token in rng.integers(0, self._worker.shape.vocab, PREFIX_TOKENS + 1)]
            recompute.append(self._submit(engine, f"cold{index}", prompt, 1, reuse=False)["ttft_s"])
            self._submit(engine, f"warm{index}", prompt, 1, reuse=True)
            self._settle(engine)
            self._engines[engine].ask(ANSWER_WAIT_S, op="clear")
            event = self._submit(engine, f"host{index}", prompt, 1, reuse=True)
            if event["hits"].get("HOST", 0) != PREFIX_TOKENS // self._worker.block_tokens:
                raise ProcessError(f"{engine} should have found the whole prefix in HOST; it found {event['hits']}")
            reuse.append(event["ttft_s"])
            advance(index + 1, PREFIX_REPEATS)
        self.report.ttft_recompute_s = round(statistics.median(recompute), 5)
        self.report.ttft_reuse_s = round(statistics.median(reuse), 5)
        self.report.ttft_ratio = round(self.report.ttft_recompute_s / self.report.ttft_reuse_s, 2)

    def _compare_tokens(self, advance: Callable[[int, int], None]) -> None:
        """Every prompt again on engines that neither acquire nor create."""
        done: queue.SimpleQueue[tuple[DemoAnswer, dict[str, Any]]] = queue.SimpleQueue()

        def compare_with(answer: DemoAnswer) -> Callable[[dict[str, Any]], None]:
            return lambda event: done.put((answer, event))

        for index, answer in enumerate(self._answers):
            engine = self._engines[ENGINES[index % len(ENGINES)]]
            engine.submit(f"again-{answer.id}", answer.tokens, NEW_TOKENS, False, compare_with(answer))
        same = True
        for index in range(len(self._answers)):
            try:
                answer, event = done.get(timeout=ANSWER_WAIT_S)
            except queue.Empty:
                logs = self.folder / "logs"
                raise ProcessError(f"no recomputed answer came within {ANSWER_WAIT_S:g} s; logs: {logs}") from None
            same &= event["tokens"] == answer.new_tokens
            self.report.tokens_compared += len(answer.new_tokens)
            advance(index + 1, len(self._answers))
        self.report.tokens_identical = same and bool(self._answers)
        self.report.smallest_logit_margin = min(answer.smallest_margin for answer in self._answers)

    # -- proof --------------------------------------------------------------------------------------------------------

    def _verify(self) -> None:
        assert self._catalog is not None
        report = self.report
        report.hits_by_tier = dict(self._hits)
        report.digests_equal = True
        for name, engine in self._engines.items():
            self._settle(name)
            engine.ask(ANSWER_WAIT_S, op="take_snapshot")
            status = self._published_status(engine)
            wait_applied(self._catalog, [(InstanceId(name), status["epoch"], status["applied"])], ANSWER_WAIT_S)
            seen = self._catalog.instance(name)
            assert seen is not None
            report.digests[name] = {"engine": status["digest"], "catalog": seen.digest}
            report.digests_equal &= seen.digest == status["digest"] and (seen.epoch, seen.offset) == (
                status["epoch"],
                status["applied"],
            )
            report.verified_reads += status["verified_reads"]
            report.corrupt_blocks += status["corrupt_blocks"]
            report.failed_copies += status["failed_copies"]
        report.events_applied = counter(self._catalog, "events")
        report.gaps = counter(self._catalog, "gaps")
        verdicts = self._replay()
        report.events_published = verdicts["stream"].events
        report.replay_verified = not any(verdict.findings for verdict in verdicts.values())
        report.replay_verdicts = {source: verified.verdict() for source, verified in verdicts.items()}

    def _published_status(self, engine: EngineProcess) -> dict[str, Any]:
        """The engine's status once everything it has decided is on the stream. Raises ProcessError: not in time."""
        deadline = time.monotonic() + ANSWER_WAIT_S
        while time.monotonic() < deadline:
            status = engine.ask(ANSWER_WAIT_S, op="status")
            if status["published"] == {"epoch": status["epoch"], "offset": status["applied"]}:
                return status
            time.sleep(0.05)
        raise engine.failure(f"did not publish its events within {ANSWER_WAIT_S:g} s")

    def _replay(self) -> dict[str, Verified]:
        journals = {f"journal of {name}": self.folder / "instances" / name / "journal" for name in ENGINES}
        sources = {"stream": self._stream_url} | {label: str(folder) for label, folder in journals.items()}
        return {label: verify(open_source(source), NATIVE, NATIVE_FOLD) for label, source in sources.items()}


def table(report: DemoReport) -> Table:
    """The report as a table for people."""
    result = Table(title="kvbm demo", show_header=False, title_justify="left")
    result.add_column(style="bold", no_wrap=True)
    result.add_column()
    hits = sum(report.hits_by_tier.values())
    share = f"{hits / report.prompt_blocks:.0%}" if report.prompt_blocks else "-"
    faster = (
        f"{report.ttft_recompute_s * 1e3:.1f} ms recomputed, {report.ttft_reuse_s * 1e3:.1f} ms from HOST: "
        f"{report.ttft_ratio:.1f} times faster"
    )
    same = (
        f"{_yes(report.tokens_identical)} ({report.tokens_compared} tokens, smallest logit margin "
        f"{report.smallest_logit_margin:.1e})"
    )
    peer = (
        f"{report.peer_blocks} of {report.peer_prompt_blocks} blocks of a prompt; tokens as computed there: "
        f"{_yes(report.peer_tokens_identical)}"
    )
    digests = ", ".join(sorted({digest for pair in report.digests.values() for digest in pair.values()}))
    rows = [
        ("requests", f"{report.requests}, {report.resubmitted_requests} sent again after the kill"),
        ("prefix hits", f"{hits} of {report.prompt_blocks} blocks ({share})"),
        *((f"  from {tier}", str(count)) for tier, count in report.hits_by_tier.items()),
        (f"first token, {PREFIX_TOKENS}-token prefix", faster),
        ("read from a peer's HOST", peer),
        ("tokens as recomputed", same),
        ("reads verified, corrupt", f"{report.verified_reads}, {report.corrupt_blocks}"),
        ("events published, applied", f"{report.events_published}, {report.events_applied}"),
        ("gaps", str(report.gaps)),
        (
            "recovered from kill -9",
            f"{_yes(report.killed_and_recovered)} ({report.recovered_blocks} blocks on NVME)",
        ),
        ("digests, engine = catalog", f"{_yes(report.digests_equal)} ({digests})"),
        *((f"replay of {source}", verdict) for source, verdict in report.replay_verdicts.items()),
        ("elapsed", f"{report.elapsed_s} s on {report.machine}"),
    ]
    for name, value in rows:
        result.add_row(name, value)
    return result


def _yes(good: bool) -> str:
    return "yes" if good else "NO"


@contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    """A fresh folder that goes away at the end, or the one to keep. Raises ConfigError: that one is none, or in use."""
    if keep is not None:
        try:
            make_folder(keep)
            is_used = any(keep.iterdir())
        except OSError as error:
            raise ConfigError(f"--keep {keep} cannot be used ({error.strerror}); give a folder") from None
        if is_used:
            raise ConfigError(f"--keep {keep} is not empty, and the demo begins with empty stores; give a new folder")
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-demo-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def main(json_path: Path | None, keep: Path | None) -> int:
    """Run the demo with live progress. Returns 0, or 1 when a check failed."""
    check_report_path(json_path)
    console = Console()
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        redirect_stdout=False,
        disable=not bars_are_shown(),
    )
    with demo_folder(keep) as folder, progress:
        tasks: list[TaskID] = []

        def step(what: str) -> None:
            if tasks:
                progress.update(tasks[-1], total=1, completed=1)
            tasks.append(progress.add_task(what, total=None))

        def advance(done: int, of: int) -> None:
            progress.update(tasks[-1], total=of, completed=done)

        report = Demo(folder, console).run(step, advance)
        progress.update(tasks[-1], total=1, completed=1)
    write_report(json_path, report)
    console.print(table(report))
    failures = report.failures()
    for failure in failures:
        console.print(f"[red]FAILED[/red]: {failure}")
    if not failures:
        console.print("[green]every check passed[/green]" + (f"; report: {json_path}" if json_path else ""))
    return 1 if failures else 0
