"""Prefill and decode on two engines: how long a prompt takes from one to the other, what that saves, what a resumed
turn takes, and what both engines together serve beside two plain ones on the same cores.

    make bench-pd [BENCH_ARGS="--only handoff --json FILE"]

It runs in the environment of `make pd`: two API servers of vLLM on this CPU, each with one thread, behind the real
vllm-router. The model is a Llama of eight layers with random weights, in float32, whose blocks of 32 tokens have
256 KiB. Times are of a client, over HTTP; nothing here asserts one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.engines.pd.harness.server import ApiServer
from tests.engines.pd.harness.shapes import DECODE, PREFILL
from tests.engines.pd.harness.site import ROUTER, Site
from tests.engines.pd.harness.streamed import Streamed, streamed
from tests.engines.vllm.harness.engine import Engines
from tests.engines.vllm.harness.models import VOCABULARY
from tests.engines.vllm.harness.words import BLOCK_TOKENS, Ask
from tests.servers import free_port

MODELS = Path(__file__).parents[1] / "build" / "engines" / "models"
INSIDE = "tools.pd_times"
PROMPT_TOKENS = 64 * BLOCK_TOKENS + 1  # 64 blocks, and the token whose output is wanted
TURN_TOKENS = 64  # of an answer, and of what follows it in the next turn
CONTEXT_TOKENS = 4096
HBM_BLOCKS, HOST_BLOCKS = 640, 1024
SERVED = {"context_tokens": CONTEXT_TOKENS, "hbm_blocks": HBM_BLOCKS, "hbm_bytes": HBM_BLOCKS << 18}
SETTINGS = {"pools.host.slots": HOST_BLOCKS, "handoff.ttl_s": 60.0}
GOAL_HANDOFF_MS = {50: 10.0, 99: 50.0}
GOAL_OF_COMPUTING = 0.25
FIRST_S, TOKEN_S = 1.0, 0.03  # what a client of the goodput part wants
LOAD_TOKENS, LOAD_OUTPUT = 1024, 32
RATES_HZ = (1.0, 2.0, 3.0)


class Row(NamedTuple):
    """One line of the table; `goal` in words."""

    what: str
    value: str
    goal: str = ""


def ask_of(seed: str, tokens: int, output_tokens: int = 1, after: tuple[int, ...] = ()) -> Ask:
    """A prompt that nobody has asked before; it begins with `after`."""
    chosen = random.Random(seed)
    more = tuple(chosen.randrange(VOCABULARY) for _ in range(tokens - len(after)))
    return Ask((*after, *more), output_tokens=output_tokens)


def quantile(values: list[float], percent: int) -> float:
    """Of few values the nearest that is not smaller."""
    return sorted(values)[min(len(values) - 1, -(-len(values) * percent // 100) - 1)]


def handoff(site: Site, samples: int) -> list[Row]:
    """From the prefiller's answer, as the router gets it, to the blocks in the decoder's HOST; and its first token."""
    site.decoder.in_core(f"{INSIDE}:watch")
    waits_ms, seen_ms, firsts_s, computed_s = [], [], [], []
    for number in range(-2, samples):  # the first two warm up
        site.forget()
        site.proxies.legs.clear()
        took = streamed(site.url(DECODE), ask_of(f"plain-{number}", PROMPT_TOKENS))
        site.settle(has_kept=True)
        moved = site.ask_times(ask_of(f"handoff-{number}", PROMPT_TOKENS))
        site.settle(has_kept=True)
        seen_s, there_s = site.decoder.in_core(f"{INSIDE}:taken")[-1]
        if number >= 0:
            computed_s.append(took.first_s)
            waits_ms.append((there_s - moved.answered_s) * 1e3)
            seen_ms.append((there_s - seen_s) * 1e3)
            firsts_s.append(moved.first_s)
    ratios = [one / other for one, other in zip(firsts_s, computed_s, strict=True)]
    rows = [
        Row(
            f"prefiller's answer → 64 blocks of 256 KiB in the decoder's HOST, p{percent}",
            f"{quantile(waits_ms, percent):.1f} ms",
            f"≤ {most:g} ms",
        )
        for percent, most in GOAL_HANDOFF_MS.items()
    ]
    return [
        *rows,
        Row("… of that, since the decoder's scheduler was asked for it first, p50", f"{quantile(seen_ms, 50):.1f} ms"),
        Row("computing 2,049 tokens on the decoder, first token", f"{statistics.median(computed_s):.2f} s"),
        Row("first token at the decoder behind a hand-off of them", f"{statistics.median(firsts_s):.3f} s"),
        Row("… over computing them", spread(ratios), f"≤ {GOAL_OF_COMPUTING}"),
    ]


def spread(ratios: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def resumed(site: Site, samples: int) -> list[Row]:
    """A turn that goes on after HBM has lost it, over computing all of it."""
    ratios = []
    for number in range(-1, samples):
        site.forget()
        first = ask_of(f"turn-{number}", PROMPT_TOKENS - TURN_TOKENS, TURN_TOKENS)
        first = first._replace(transfer={"kvbm.keep_s": 60})
        said = site.begin(DECODE, first).answer().tokens
        site.forget()
        total = PROMPT_TOKENS + TURN_TOKENS
        again = streamed(site.url(DECODE), ask_of(f"more-{number}", total, 1, (*first.tokens, *said)))
        site.settle(has_kept=True)
        plain = streamed(site.url(DECODE), ask_of(f"long-{number}", total))
        site.settle(has_kept=True)
        if number >= 0:
            ratios.append(again.first_s / plain.first_s)
    return [Row("first token of a resumed turn over computing it", spread(ratios), f"≤ {GOAL_OF_COMPUTING}")]


def load(ask: Callable[[int, Ask], Streamed], rate_hz: float, requests: int) -> tuple[float, float, float]:
    """Requests at random moments, so many a second.

    Returns: those served as a client wants them, a second; p50 of the first token; p50 of seconds a further token.
    """
    rng = random.Random(f"{rate_hz}")
    found: list[Streamed | None] = [None] * requests
    threads = []

    def one(number: int) -> None:
        found[number] = ask(number, ask_of(f"load-{rate_hz}-{number}-{os.urandom(8).hex()}", LOAD_TOKENS, LOAD_OUTPUT))

    began_s = time.monotonic()
    for number in range(requests):
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(rng.expovariate(rate_hz))
    for thread in threads:
        thread.join(300.0)
    took_s = time.monotonic() - began_s
    came = [one for one in found if one is not None]
    each_s = [(one.last_s - one.first_s) / max(1, one.tokens - 1) for one in came]
    good = sum(one.first_s <= FIRST_S and each <= TOKEN_S for one, each in zip(came, each_s, strict=True))
    return good / took_s, statistics.median(one.first_s for one in came), statistics.median(each_s)


def goodput(site: Site, router: str, plain: list[ApiServer], requests: int) -> list[Row]:
    """Split over prefiller and decoder, and over two plain engines in turn, one after the other at each rate."""
    rows = []
    for rate_hz in RATES_HZ:
        sides = {
            "split": lambda _, ask: streamed(router, ask),
            "two plain engines": lambda number, ask: streamed(plain[number % 2].url, ask),
        }
        for name, ask in sides.items():
            good, first_s, each_s = load(ask, rate_hz, requests)
            site.settle(has_kept=True)
            rows.append(
                Row(
                    f"{name}, {rate_hz:g} requests a second: first token ≤ {FIRST_S:g} s, others ≤ {TOKEN_S:g} s each",
                    f"{good:.2f} a second; p50 {first_s:.2f} s, {each_s * 1e3:.0f} ms",
                )
            )
    return rows


class Moved(NamedTuple):
    """One prompt on its way: when the prefiller's answer was there (`time.monotonic`), and seconds from then to the
    first token.
    """

    answered_s: float
    first_s: float


class TimedSite(Site):
    """A site that tells when a leg reaches the decoder."""

    @contextmanager
    def direct(self) -> Iterator[str]:
        """Another router, without recorders before the engines: those hand on whole answers, not token by token."""
        url = f"http://127.0.0.1:{free_port()}"
        router = self._start_router(url, self.proxies.engines)
        try:
            yield url
        finally:
            router.kill()
            router.stop()

    def ask_times(self, ask: Ask) -> Moved:
        """Have it computed and decoded through the router."""
        at_s: list[float] = []
        self.before_decode(lambda: at_s.append(time.monotonic()))
        asked_s = time.monotonic()
        took = streamed(self.url(ROUTER), ask)
        self.before_decode()
        (answered_s,) = at_s
        assert len(self.proxies.sent(PREFILL)) == len(self.proxies.sent(DECODE)) == 1
        return Moved(answered_s, asked_s + took.first_s - answered_s)


@contextmanager
def engines(model: str, folder: Path) -> Iterator[list[ApiServer]]:
    """Two plain ones, without a connector."""
    started = [ApiServer(model, None, new_folder(folder / f"plain-{at}"), **SERVED) for at in range(2)]
    try:
        yield [one.wait() for one in started]
    finally:
        for one in started:
            one.kill()


def new_folder(folder: Path) -> Path:
    """Made."""
    folder.mkdir(parents=True)
    return folder


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("handoff", "resumed", "goodput"), action="append")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--requests", type=int, default=40, help="of each load")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.only or ["handoff", "resumed", "goodput"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder:
        makers = Engines(MODELS, Path(folder))
        model = makers.model("llama-deep")
        site = TimedSite(model, Path(folder) / "site", SETTINGS, **SERVED)
        try:
            if "handoff" in parts:
                rows += handoff(site, options.samples)
            if "resumed" in parts:
                rows += resumed(site, max(3, options.samples // 3))
            if "goodput" in parts:
                with engines(model, Path(folder)) as plain, site.direct() as router:
                    rows += goodput(site, router, plain, options.requests)
        finally:
            site.close()
            makers.close()
    print(f"{os.cpu_count()} CPUs, {platform.machine()}; two engines of one thread each")
    width = max(len(row.what) for row in rows)
    for row in rows:
        print(f"{row.what:<{width}}  {row.value:>28}  {row.goal}")
    if options.json is not None:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
