"""One run of the janitor, step by step, without thread, clock or socket.

`step(now_s, answer)` takes the answer to the last effect and gives the next one, until there is none. In this order:

1. It takes the lease, so that one janitor works for all clusters of a store, and compares the two clocks.
2. It finishes the tombstones that another janitor has left: their grace begins anew, then what nobody has claimed since
   is deleted.
3. It reconciles the claims in SQL with the store's listing. Objects without a claim are claimed; claims without an
   object are withdrawn.
4. It chooses victims: objects older than their time, and objects above a quota. It withdraws the claims of their blocks
   that no other object holds, and waits until SQL has that. It writes their names into the store as tombstones, where
   every instance sees them. After the grace it deletes what nobody has claimed since, and removes the tombstones.

A janitor may die at any time:

    died after              what the next run does
    the withdrawal          finds objects without a claim and claims them
    the tombstones          begins their grace anew, whatever its cluster, then deletes or keeps
    the deletion            finds the object gone and removes the tombstones

Nothing is deleted before its name was in tombstones for a whole grace of one janitor, on that janitor's own monotonic
clock, without a new claim. A holder of the lease that slept for longer than the lease notices before its next batch. If
it sleeps between that check and the deletion, the late deletion costs a miss, never a wrong byte.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvbm.core.errors import KvbmError
from kvbm.janitor.effects import Begin, Effect, ReadClaims
from kvbm.janitor.holdings import Holdings
from kvbm.janitor.reconcile import Reconciler
from kvbm.janitor.report import Report
from kvbm.janitor.rules import Rules
from kvbm.janitor.run_steps import RunSteps, Steps, do
from kvbm.janitor.withdrawal import LIST_NAMES, Withdrawer

WAVE_NAMES = 16 * LIST_NAMES  # withdrawn together, at most: each wave waits for one grace


class Janitor:
    """See the module.

    Args:
        holder, run: who this is, for people, and a number of its own.
        dry_run: look, and change nothing; it needs neither lease nor instance.

    Attributes:
        report: what was found and done so far.
    """

    def __init__(self, pool: str, holder: str, run: str, rules: Rules, dry_run: bool = False) -> None:
        self.report = Report(pool=pool, dry_run=dry_run)
        self._steps = RunSteps(holder, run, rules, self.report)
        self._reconciler = Reconciler(self._steps)
        self._withdrawer = Withdrawer(self._steps)
        self._work = self._whole_run()
        self._begun = False

    def step(self, now_s: float, answer: Any = None) -> Effect[Any] | None:
        """The next effect; None when the run is over.

        Args:
            now_s: on a monotonic clock that goes on while a process sleeps.
            answer: to the last effect; an exception of kvbm's where it failed.
        Raises: what ends the run early: JanitorError, or the exception that was given.
        """
        self._steps.now_s = now_s
        try:
            if isinstance(answer, KvbmError):
                return self._work.throw(answer)
            if not self._begun:
                self._begun = True
                return next(self._work)
            return self._work.send(answer)
        except StopIteration:
            return None

    def _whole_run(self) -> Steps[None]:
        steps, reconciler, withdrawer = self._steps, self._reconciler, self._withdrawer
        yield from steps.take_lease()
        try:
            if not self.report.dry_run:
                yield from do(Begin())
                yield from steps.wait_for_sql()
            yield from withdrawer.finish_left()
            holdings = Holdings((yield from do(ReadClaims())))
            found_bytes = yield from reconciler.inspect_objects(holdings)
            yield from reconciler.reconcile(holdings)
            reconciler.count_parts(holdings, found_bytes)
            if steps.rules.erase is None:
                victims = withdrawer.choose(holdings, found_bytes)
            else:
                victims = yield from withdrawer.choose_erased(holdings, steps.rules.erase)
            for at in range(0, len(victims), WAVE_NAMES):
                yield from withdrawer.withdraw(holdings, victims[at : at + WAVE_NAMES])
        except KvbmError:
            with suppress(KvbmError):  # the lease ends by itself
                yield from steps.give_lease_back()
            raise
        yield from steps.give_lease_back()
