"""The long run of the fault simulator: many seeds over processes, any of them again.

    python tools/fault_seeds.py --seeds 20000                    run seeds 0 … 19,999
    python tools/fault_seeds.py --seeds 20000 --run-s 3          the same, each a third as long and as full of faults
    python tools/fault_seeds.py --seed 4711                      one seed, told step by step
    python tools/fault_seeds.py --seed 4711 --minimise           the same with as few faults as still break it
    python tools/fault_seeds.py --mutant no_fencing --seeds 200  until a deliberate defect is found

Ends with 1 when a seed broke something. What the simulator does is in tests/faults/simulator.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.faults.mutants import MUTANTS
from tests.faults.simulator.run import RUN_S, Outcome, Plan, run_seed, watched

CHUNK = 10


def run_chunk(seeds: list[int], mutant: str, how: Plan) -> list[Outcome]:
    """Some seeds, one after another, in this process."""
    found = []
    with ExitStack() as stack:
        stack.enter_context(watched())
        if mutant:
            stack.enter_context(MUTANTS[mutant].planted())
            how = how._replace(mix=MUTANTS[mutant].mix, run_s=min(how.run_s, MUTANTS[mutant].run_s))
        for seed in seeds:
            found.append(run_seed(seed, how))
            gc.collect()
    return found


def one(seed: int, mutant: str, minimise: bool, how: Plan) -> int:
    """One seed, aloud."""
    with ExitStack() as stack:
        stack.enter_context(watched())
        if mutant:
            stack.enter_context(MUTANTS[mutant].planted())
            how = how._replace(mix=MUTANTS[mutant].mix, run_s=min(how.run_s, MUTANTS[mutant].run_s))
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
        f"\nseed {seed}: {outcome.steps} steps, {outcome.operations} operations, {outcome.faults} faults, {outcome.trace}"
    )
    print(outcome.violation or "nothing was broken")
    return 1 if outcome.violation else 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone, and tell what happens")
    parser.add_argument("--minimise", action="store_true", help="leave out what the violation does not need")
    parser.add_argument("--mix", default="", help="kinds of faults to draw from, with commas; else any")
    parser.add_argument(
        "--run-s",
        type=float,
        default=RUN_S,
        metavar="S",
        help=f"virtual seconds with work and faults (default {RUN_S:g})",
    )
    parser.add_argument("--mutant", choices=sorted(MUTANTS), default="", help="plant this defect")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    wanted = parser.parse_args()
    how = Plan(mix=tuple(filter(None, wanted.mix.split(","))), run_s=wanted.run_s)
    if wanted.seed is not None:
        return one(wanted.seed, wanted.mutant, wanted.minimise, how)
    seeds = range(wanted.first, wanted.first + wanted.seeds)
    chunks = [list(seeds[at : at + CHUNK]) for at in range(0, len(seeds), CHUNK)]
    begun_s = time.monotonic()
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    work = partial(run_chunk, mutant=wanted.mutant, how=how)
    with Pool(wanted.processes, maxtasksperchild=20) as pool, Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("seeds", total=len(seeds))
        for found in pool.imap_unordered(work, chunks):
            for outcome in found:
                outcomes.append(outcome)
                if outcome.violation:
                    bar.console.print(
                        f"seed {outcome.seed}, step {outcome.steps}, {outcome.virtual_s:.1f} s: {outcome.violation}",
                        highlight=False, soft_wrap=True,
                    )  # fmt: skip
            if not bar.console.is_terminal and len(outcomes) % 100 < CHUNK:
                bar.console.print(f"{len(outcomes)} of {len(seeds)} seeds")
            bar.update(shown, advance=len(found))
    broken = sorted(outcome.seed for outcome in outcomes if outcome.violation)
    summary = {
        "seeds": len(outcomes),
        "first": wanted.first,
        "broken": broken,
        "least_steps": min(outcome.steps for outcome in outcomes),
        "least_faults": min(outcome.faults for outcome in outcomes),
        "steps": sum(outcome.steps for outcome in outcomes),
        "operations": sum(outcome.operations for outcome in outcomes),
        "faults": sum(outcome.faults for outcome in outcomes),
        "catalog_checks": sum(outcome.checks for outcome in outcomes),
        "messages": sum(outcome.messages for outcome in outcomes),
        "virtual_s": round(sum(outcome.virtual_s for outcome in outcomes)),
        "elapsed_s": round(time.monotonic() - begun_s, 1),
    }
    if wanted.json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['seeds']} seeds from {wanted.first} on in {summary['elapsed_s']} s: {summary['steps']:,} steps (at least "
            f"{summary['least_steps']:,} a seed), {summary['faults']:,} faults (at least {summary['least_faults']}), "
            f"{summary['operations']:,} operations, {summary['catalog_checks']:,} checks of the catalog; "
            f"{len(broken)} broken{': ' + ', '.join(map(str, broken[:20])) if broken else ''}"
        )
    return 1 if broken else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
