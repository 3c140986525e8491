"""The long run of the fault simulator: many seeds over processes, any of them again.

    python tools/fault_seeds.py --seeds 20000                    run seeds 0 … 19,999
    python tools/fault_seeds.py --seeds 20000 --run-s 3          the same, each a third as long and as full of faults
    python tools/fault_seeds.py --seed 4711                      one seed, told step by step
    python tools/fault_seeds.py --seed 4711 --minimise           the same with as few faults as still break it
    python tools/fault_seeds.py --peers --seeds 1000             instances that read each other's blocks
    python tools/fault_seeds.py --limits --seeds 2000            where threads, descriptors and names run out
    python tools/fault_seeds.py --owning --seeds 2000            engines that own HBM; --limits may stand beside it
    python tools/fault_seeds.py --mutant no_fencing --seeds 200  until a deliberate defect is found
    python tools/fault_seeds.py --pairs --seeds 2                every two kinds of faults that meet, two seeds each
    python tools/fault_seeds.py --triples --of 200               200 of all threes, one seed each
    python tools/fault_seeds.py --together trim,kill --seeds 50  these two (or more) meet, 50 times

A seed without --mix and --together draws from all kinds, mostly two or three that meet. What is broken is told with the
command that repeats it; add --minimise to it.

Ends with 1 when a seed broke something. What the simulator does is in tests/faults/simulator.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults.mutants import MUTANTS
from tests.faults.simulator.drawing import pairs, triples
from tests.faults.simulator.faults import KINDS
from tests.faults.simulator.limit_faults import LIMIT_KINDS
from tests.faults.simulator.peer_faults import PEER_KINDS
from tests.faults.simulator.run import (
    LIMITS,
    LIMITS_S,
    OWNING,
    OWNING_LIMITS,
    OWNING_S,
    PEERS,
    PEERS_S,
    RUN_S,
    SHORT_S,
    Outcome,
    Plan,
    run_seed,
    watched,
)

CHUNK = 10
COLLECT_EVERY = 3


Job = tuple[int, Plan]


def run_chunk(jobs: list[Job], mutant: str) -> list[tuple[Outcome, Plan]]:
    """Some seeds, one after another, in this process."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(watched())
        if mutant:
            stack.enter_context(MUTANTS[mutant].planted())
        for number, (seed, how) in enumerate(jobs, 1):
            found.append((run_seed(seed, how), how))
            if number % COLLECT_EVERY == 0:
                gc.collect()
    return found


def jobs_of(wanted: argparse.Namespace, how: Plan) -> list[Job]:
    """Which seeds to run, and how each."""
    parties: list[tuple[str, ...]] = []
    if wanted.pairs or wanted.triples:
        parties = [*(pairs() if wanted.pairs else []), *(triples() if wanted.triples else [])]
        if wanted.of:
            parties = sorted(random.Random(wanted.first).sample(parties, min(wanted.of, len(parties))))
    seeds = wanted.seeds or (1 if parties else 300)
    plans = [how._replace(together=party) for party in parties] or [how]
    return [(wanted.first + at * seeds + number, plan) for at, plan in enumerate(plans) for number in range(seeds)]


def one(seed: int, mutant: str, minimise: bool, how: Plan) -> int:
    """One seed, aloud."""
    with ExitStack() as stack:
        stack.enter_context(watched())
        if mutant:
            stack.enter_context(MUTANTS[mutant].planted())
        outcome = run_seed(seed, how, say=None if minimise else print)
        if minimise and outcome.violation:
            without: frozenset[int] = frozenset()
            for number in reversed(range(len(outcome.planned))):
                fewer = how._replace(without=without | {number})
                if run_seed(seed, fewer).violation:
                    without = fewer.without
            outcome = run_seed(seed, how._replace(without=without), say=print)
            left = [fault for number, fault in enumerate(outcome.planned) if number not in without]
            print(f"\n{len(left)} of {len(outcome.planned)} faults suffice:")
            for fault in left:
                print(f"  {fault.at_s:8.3f} s  {fault.kind} for {fault.for_s:.2f} s")
    print(
        f"\nseed {seed}: {outcome.steps} steps, {outcome.operations} operations, {outcome.faults} faults, "
        f"{outcome.trace}"
    )
    print(outcome.violation or "nothing was broken")
    return 1 if outcome.violation else 0


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seeds", type=int, help="how many; with --pairs and --triples of each (default 300; 1 of each)"
    )
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone, and tell what happens")
    parser.add_argument("--minimise", action="store_true", help="leave out what the violation does not need")
    parser.add_argument("--mix", default="", help="kinds of faults to draw single ones from, with commas")
    parser.add_argument("--together", default="", help="kinds of faults that meet, one of each, with commas")
    parser.add_argument("--pairs", action="store_true", help="every two kinds together")
    parser.add_argument("--triples", action="store_true", help="every three kinds together")
    parser.add_argument("--peers", action="store_true", help="instances read each other's blocks")
    parser.add_argument(
        "--limits", action="store_true", help="threads, descriptors, names and undisturbed calls run out"
    )
    parser.add_argument("--owning", action="store_true", help="most instances have an engine that owns HBM")
    parser.add_argument("--of", type=int, default=0, metavar="N", help="only N of the pairs or triples, by chance")
    parser.add_argument(
        "--run-s",
        type=float,
        metavar="S",
        help=f"virtual seconds with work and faults (default {RUN_S:g}; {SHORT_S:g} for faults that meet, {PEERS_S:g} "
        "with --peers, "
        f"{LIMITS_S:g} with --limits, {OWNING_S:g} with --owning)",
    )
    parser.add_argument(
        "--mutant", choices=sorted(MUTANTS), default="", help="plant this defect; its mix, if none is named"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    return parser.parse_args()


def plan_of(wanted: argparse.Namespace) -> Plan:
    """How each seed runs. Exits: a kind of fault is not known."""
    mix, together = (tuple(filter(None, words.split(","))) for words in (wanted.mix, wanted.together))
    usual = LIMITS if wanted.limits else PEERS if wanted.peers else Plan()
    if wanted.owning:
        usual = OWNING_LIMITS if wanted.limits else PEERS._replace(owning=True) if wanted.peers else OWNING
    planned = MUTANTS[wanted.mutant].plan if wanted.mutant else usual
    known = KINDS | (PEER_KINDS if planned.peers else {}) | (LIMIT_KINDS if planned.limits else {})
    if unknown := sorted({*mix, *together} - set(known)):
        sys.exit(f"no fault is called {', '.join(unknown)}; there are {', '.join(known)}")
    meets = bool(together or wanted.pairs or wanted.triples)
    run_s = wanted.run_s or (SHORT_S if meets else planned.run_s)
    if not (mix or meets):
        mix, run_s = planned.mix, min(run_s, planned.run_s) if wanted.mutant else run_s
    return planned._replace(mix=mix, together=together, run_s=run_s)


def main() -> int:
    """See the module."""
    wanted = parsed()
    how = plan_of(wanted)
    if wanted.seed is not None:
        return one(wanted.seed, wanted.mutant, wanted.minimise, how)
    jobs = jobs_of(wanted, how)
    chunks = [jobs[at : at + CHUNK] for at in range(0, len(jobs), CHUNK)]
    begun_s = time.monotonic()
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    work = partial(run_chunk, mutant=wanted.mutant)
    with Pool(wanted.processes, maxtasksperchild=20) as pool, Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("seeds", total=len(jobs))
        for found in pool.imap_unordered(work, chunks):
            for outcome, plan in found:
                outcomes.append(outcome)
                if outcome.violation:
                    bar.console.print(
                        f"--seed {outcome.seed} {plan.words}: step {outcome.steps}, {outcome.virtual_s:.1f} s: "
                        f"{outcome.violation}",
                        highlight=False,
                        soft_wrap=True,
                    )
            if not bar.console.is_terminal and len(outcomes) % 500 < CHUNK:
                bar.console.print(f"{len(outcomes)} of {len(jobs)} seeds")
            bar.update(shown, advance=len(found))
    met = sum(outcome.met for outcome in outcomes)
    reached: Counter[str] = Counter()
    for outcome in outcomes:
        reached.update(outcome.reached)
    broken = sorted(outcome.seed for outcome in outcomes if outcome.violation)
    summary = {
        "seeds": len(outcomes),
        "first": wanted.first,
        "broken": broken,
        "met": met,
        "least_steps": min(outcome.steps for outcome in outcomes),
        "least_faults": min(outcome.faults for outcome in outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "operations": sum(outcome.operations for outcome in outcomes),
        "faults": sum(outcome.faults for outcome in outcomes),
        "catalog_checks": sum(outcome.checks for outcome in outcomes),
        "messages": sum(outcome.messages for outcome in outcomes),
        "reached": dict(sorted(reached.items())),
        "virtual_s": round(sum(outcome.virtual_s for outcome in outcomes)),
        "elapsed_s": round(time.monotonic() - begun_s, 1),
    }
    of_limits = "".join(f"{what} {count:,} times, " for what, count in sorted(reached.items()))
    if wanted.json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['seeds']} seeds from {wanted.first} on in {summary['elapsed_s']} s: {summary['steps']:,} steps "
            "(at least "
            f"{summary['least_steps']:,} a seed), {summary['faults']:,} faults (at least {summary['least_faults']}), "
            f"{summary['operations']:,} operations, {summary['catalog_checks']:,} checks of the catalog; "
            f"{of_limits}"
            f"{f'{met} of them had the faults meet; ' if how.together or wanted.pairs or wanted.triples else ''}"
            f"{len(broken)} broken{': ' + ', '.join(map(str, broken[:20])) if broken else ''}"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
