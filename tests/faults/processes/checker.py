"""Whether everybody agrees: each instance's ledger, the catalogs' answers, SQL, and the replay of archive and
journal.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvbm.cli import replay_main
from kvbm.core.ids import HASH_BYTES
from kvbm.workload.processes import ProcessError
from tests.extras import needed
from tests.faults.processes.content import BRANCHES, FAMILIES, NAMESPACE, prompt_hashes
from tests.faults.processes.parties import CatalogParty, PostgresParty, WorkerParty

asyncpg = needed("asyncpg", "catalog")

SAMPLED_BLOCKS, SAMPLED_PROMPTS = 8, 5
POLL_S = 0.25
ANOMALIES = "anomalies"  # in `Checker.allowed["index"]`
_HEX = 2 * HASH_BYTES


class Verdict(NamedTuple):
    """What a check found.

    Attributes:
        differences: what still differed when time was up; empty when all agree.
        wait_s: how long it took until all agreed.
    """

    differences: list[str]
    wait_s: float


class Checker:
    """Compares what the parties say.

    Attributes:
        allowed: kinds of findings that `kvbm-replay verify` may name from now on, by source: what the loop itself has
            just done. What was named and allowed once stays so.
        explained: how many findings were allowed.
        wants_snapshots: messages may be hidden that nobody read before: what was read is right, but a later reader
            misses them, until the instances have listed again what they hold.
    """

    def __init__(
        self, workers: Sequence[WorkerParty], catalogs: Sequence[CatalogParty], postgres: PostgresParty, seed: int
    ) -> None:
        self._workers, self._catalogs, self._postgres = workers, catalogs, postgres
        self._random = random.Random(seed)
        self.allowed: dict[str, set[str]] = {}
        self.wants_snapshots = False
        self._anomalies: dict[tuple[str, int], dict[str, float]] = {}  # catalog's process → rule → how often
        self._known: dict[str, set[str]] = {}  # source → findings, as text

    def check(self, timeout_s: float, archives: bool = True) -> Verdict:
        """Hold still, wait until all agree, let go.

        Args:
            archives: whether the archives are folded as well, which costs most.
        """
        begin_s = time.monotonic()
        workers = [worker for worker in self._workers if worker.expected]
        differences = ["nothing was compared"]
        try:
            for worker in workers:
                worker.ask(op="pause")
            while differences:
                differences = self._compare(workers, archives)
                if time.monotonic() - begin_s > timeout_s:
                    break
                if differences:
                    time.sleep(POLL_S)
            for worker in workers:
                worker.ask(op="resume")
        except ProcessError as error:
            differences = [str(error)]
        differences += [
            f"{worker.name} was given wrong bytes: {worker.wrong}" for worker in self._workers if worker.wrong
        ]
        return Verdict(differences, time.monotonic() - begin_s)

    def _compare(self, workers: Sequence[WorkerParty], archives: bool) -> list[str]:
        """Cheap comparisons first; the next only when those before agree."""
        states = {worker.instance: worker.ask(op="status") for worker in workers}
        found = [
            difference
            for catalog in self._catalogs
            if catalog.expected
            for difference in _instances_differ(catalog, states)
        ]
        if found:
            return found
        states = {worker.instance: worker.ask(op="state") for worker in workers}
        for state in states.values():
            state["held"] = {tier: set(_split(packed)) for tier, packed in state["held"].items()}
        for catalog in self._catalogs:
            if catalog.expected:
                found += self._answers_differ(catalog, states)
                found += self._index_complains(catalog)
        found += self._rows_differ(states)
        if found:
            return found
        if self.wants_snapshots:
            catalog = next(catalog for catalog in self._catalogs if catalog.expected)
            asked = [catalog.get(f"/v1/instances/{name}/snapshot", {}) for name in states]
            self.wants_snapshots = None in asked
            return ["snapshots are asked for"]
        for worker in workers:
            found += self._replay_differs(worker.journal, {worker.instance: states[worker.instance]}, "journal")
        for catalog in self._catalogs:
            if archives and catalog.expected and catalog.archive.exists():
                found += self._replay_differs(catalog.archive, states, "archive")
        return found

    def _index_complains(self, catalog: CatalogParty) -> Iterable[str]:
        """Rules that events have broken, though a snapshot may have healed it since."""
        text = catalog.get("/metrics")
        if text is None:
            yield f"{catalog.name}: no metrics"
            return
        counted = {}
        for line in text.splitlines():
            if line.startswith(("kvbm_catalog_anomalies_total{", "kvbm_catalog_digest_divergence_total")):
                name, _, value = line.rpartition(" ")
                counted[name] = float(value)
        # a process that has just begun repeats events since before its checkpoint was whole, and so meets some of them
        # twice
        before = self._anomalies.get((catalog.name, catalog.pid()), counted)
        more = {name: value for name, value in counted.items() if value > before.get(name, 0.0)}
        if more and ANOMALIES not in self.allowed.get("index", set()):
            yield f"{catalog.name}: events broke rules in its index: {more}, before {before}"
        else:
            self._anomalies[catalog.name, catalog.pid()] = counted

    def _answers_differ(self, catalog: CatalogParty, states: dict[str, Any]) -> Iterable[str]:
        held = {name: set().union(*state["held"].values()) for name, state in states.items()}
        everything = sorted(set().union(*held.values()))
        namespace = NAMESPACE.id.hex()
        for block in self._random.sample(everything, min(SAMPLED_BLOCKS, len(everything))):
            answer = catalog.get(f"/v1/blocks/{namespace}/{block}")
            told = None if answer is None else {(one["name"], one["tier"], one["suspect"]) for one in answer["holders"]}
            true = {
                (n, tier, False)
                for n, state in states.items()
                for tier in state["held"]
                if block in state["held"][tier]
            }
            if told != true:
                yield f"{catalog.name}: block {block} is held by {sorted(true)}, it says {told and sorted(told)}"
        for _ in range(SAMPLED_PROMPTS):
            family, branch = self._random.randrange(FAMILIES), self._random.randrange(BRANCHES)
            prompt = _split(prompt_hashes(family, branch).hex())
            answer = catalog.get("/v1/lookup", {"namespace": namespace, "hashes": "".join(prompt)})
            if answer is None:
                yield f"{catalog.name}: no answer to a lookup"
                continue
            told_depths = {one["instance"]: one["depth"] for one in answer["instances"] if one["depth"]}
            true_depths = {name: depth for name in held if (depth := _depth(prompt, held[name]))}
            if told_depths != true_depths:
                yield f"{catalog.name}: prompt {family}/{branch} is held to {true_depths}, it says {told_depths}"

    def _rows_differ(self, states: dict[str, Any]) -> Iterable[str]:
        try:
            instances, epochs, positions = self._postgres.rows(
                "SELECT id, epoch, state FROM instances",
                "SELECT * FROM epochs ORDER BY instance, epoch",
                "SELECT * FROM instance_positions",
            )
        except (OSError, asyncpg.PostgresError) as error:
            yield f"SQL: {error!r}"
            return
        for name, state in states.items():
            row = next((row for row in instances if row["id"] == name), None)
            if row is None or (row["epoch"], row["state"]) != (state["epoch"], "live"):
                yield f"SQL: instance {name} is in epoch {state['epoch']}, its row says {row}"
            row = next((row for row in positions if row["instance"] == name), None)
            if row is None or (row["epoch"], row["next_offset"]) != (state["epoch"], state["applied"]):
                yield f"SQL: instance {name} is at {state['epoch']}:{state['applied']}, its position says {row}"
            own = [row for row in epochs if row["instance"] == name]
            last = own[-1] if own else None
            if last is None or (last["epoch"], last["next_offset"], last["digest"]) != (
                state["epoch"],
                state["applied"],
                state["digest"],
            ):
                yield (
                    f"SQL: instance {name} is at {state['epoch']}:{state['applied']} {state['digest']}, its epoch "
                    f"says {last}"
                )
            if any(row["ended_ns"] is None for row in own[:-1]):
                yield f"SQL: instance {name} has epochs that never ended before its last one"

    def _replay_differs(self, source: Path, states: dict[str, Any], what: str) -> list[str]:
        """Fold a source with `kvbm-replay` and hold it to the ledgers."""
        code, answer, words = run_replay("state", str(source), "--blocks")
        if answer is None:
            return [f"{what} {source}: kvbm-replay state returned {code}: {words}"]
        found = []
        told = {one["instance"]: one for one in answer["instances"]}
        for name, state in states.items():
            one = told.get(name)
            if one is None or (one["epoch"], one["offset"], one["digest"]) != (
                state["epoch"],
                state["applied"],
                state["digest"],
            ):
                says = one and f"{one['epoch']}:{one['offset']} {one['digest']}"
                found.append(
                    f"{what}: {name} is at {state['epoch']}:{state['applied']} {state['digest']}, its replay {says}"
                )
                continue
            tiers = {tier["tier"]: {block["hash"] for block in tier["blocks"]} for tier in one["tiers"]}
            for tier, held in state["held"].items():
                if tiers.get(tier, set()) != held:
                    found.append(
                        f"{what}: {name} holds {len(held)} blocks in {tier}, its replay other "
                        f"{len(tiers.get(tier, ()))}"
                    )
        return found + self.verify(source, what)

    def verify(self, source: Path | str, what: str) -> list[str]:
        """What `kvbm-replay verify` finds that is not tolerated."""
        code, answer, words = run_replay("verify", str(source))
        if answer is None:
            return [f"{what} {source}: kvbm-replay verify returned {code}: {words}"]
        known, allowed = self._known.setdefault(str(source), set()), self.allowed.get(what, set())
        found = []
        for finding in answer["findings"]:
            name = str([finding[key] for key in ("kind", "source", "sequence", "byte", "instance", "epoch", "offset")])
            if finding["kind"] in allowed:
                known.add(name)
            elif name not in known:
                found.append(f"{what} {source}: {finding}")
        return found[:5]

    @property
    def explained(self) -> int:
        """See the class."""
        return sum(map(len, self._known.values()))


def _instances_differ(catalog: CatalogParty, states: dict[str, Any]) -> Iterable[str]:
    ready = catalog.get("/readyz")
    if ready is None or ready["degraded"]:
        yield f"{catalog.name}: not ready, or degraded: {ready}"
        return
    answer = catalog.get("/v1/instances")
    if answer is None:
        yield f"{catalog.name}: no answer"
        return
    told = {one["instance"]: one for one in answer["instances"]}
    for name, state in states.items():
        true = {
            "state": "live",
            "epoch": state["epoch"],
            "offset": state["applied"],
            "digest": state["digest"],
            "suspect": False,
            "partial": False,
        }
        one = told.get(name, {})
        says = {key: one.get(key) for key in true}
        if says != true:
            yield f"{catalog.name}: {name} is {true}, it says {says}"
        counts = {tier: count for tier, count in one.get("held_blocks", {}).items() if count}
        if counts != (true_counts := {tier: count for tier, count in state["counts"].items() if count}):
            yield f"{catalog.name}: {name} holds {true_counts}, it says {counts}"


def run_replay(command: str, source: str, *flags: str) -> tuple[int, Any, str]:
    """`kvbm-replay` in this process: its exit code, its JSON (None when it has none), and its words."""
    words = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
            code = replay_main([command, source, "--json", str(out), *flags])
        answer = msgspec.json.decode(out.read_bytes()) if out.exists() and out.stat().st_size else None
    return code, answer, words.getvalue()


def _split(packed: str) -> list[str]:
    return [packed[at : at + _HEX] for at in range(0, len(packed), _HEX)]


def _depth(prompt: Sequence[str], held: set[str]) -> int:
    return next((at for at, block in enumerate(prompt) if block not in held), len(prompt))
