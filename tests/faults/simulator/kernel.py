"""Virtual time for production code: processes, threads, an asyncio loop and clocks, all driven from one queue.

Threads of the code under test are greenlets, its asyncio tasks run on `Loop`. Nothing here waits for real time or runs
beside something else: whoever would block gives way to the queue, so one seed is one order of events. A process is a
set of threads and tasks that die together; killing one never runs a line of it again, freezing one keeps its work until
it is thawed.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ALL_COMPLETED, Future
from contextlib import ExitStack, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any

import greenlet

MOST_STEPS_AT_ONCE = 50_000  # without time going on: somebody waits for nothing
NO_THREAD = "can't start new thread"


class _Installed:
    """The world that stand-ins of modules speak to."""

    world: World


INSTALLED = _Installed()


class Killed(BaseException):
    """The process of this thread was killed while the thread waited. No `except Exception` may see it."""


class Violation(BaseException):
    """Something that must never be.

    No `except` of the code under test can hide it: the world ends with the first one.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        if INSTALLED.world.violation is None:
            INSTALLED.world.violation = self


class SimulatorError(Exception):
    """The code under test did what the simulator cannot do, such as blocking in the loop."""


class Clock:
    """A machine's two clocks. The wall may be stepped; the monotonic one begins anywhere and only grows."""

    def __init__(self, world: World, begin_s: float) -> None:
        self._world = world
        self._begin_s = begin_s
        self.wall_step_s = 0.0

    def monotonic(self) -> float:
        return self._begin_s + self._world.now

    def wall_ns(self) -> int:
        return int((1_800_000_000.0 + self.wall_step_s + self._world.now) * 1e9)


class Shortages:
    """What a machine's system refuses its processes for a while, each time with a chance.

    Attributes:
        threads: how probable it is that a thread cannot be started. descriptors: the same of a file or a connection.
        refused: how often either was refused.
    """

    def __init__(self, chance: random.Random | None = None, refused: Counter[str] | None = None) -> None:
        self._chance = chance or random.Random(0)
        self.threads = self.descriptors = 0.0
        self.refused: Counter[str] = Counter() if refused is None else refused

    def check_thread(self, whose: str = "threads") -> None:
        """Raises RuntimeError: there is none now. `whose` says what is counted."""
        if self.threads and self._chance.random() < self.threads:
            self.refused[whose] += 1
            raise RuntimeError(NO_THREAD)

    def check_descriptor(self, what: str) -> None:
        """Raises OSError: there is none now."""
        if self.descriptors and self._chance.random() < self.descriptors:
            self.refused["descriptors"] += 1
            raise OSError(errno.EMFILE, "Too many open files (simulated)", what)


class Signal:
    """A signal that comes in the middle of a call of an engine's thread, where that waits, takes a lock or looks at a
    clock.

    Args:
        points: of such places that it lets pass.
        after_s: for how long a wait goes on before it comes.
        handler: what it does; it may raise.
    """

    def __init__(self, points: int, after_s: float, handler: Callable[[], object]) -> None:
        self.points, self.after_s, self.handler = points, after_s, handler
        self.is_over = False

    def is_here(self) -> bool:
        """Whether it comes at this place."""
        self.points -= 1
        return self.points < 0 and not self.is_over

    def come(self) -> None:
        """Call its handler, once."""
        if not self.is_over:
            self.is_over = True
            self.handler()


class Process:
    """Threads and tasks that live and die together on one machine."""

    def __init__(self, name: str, clock: Clock, machine: str = "", shortages: Shortages | None = None) -> None:
        self.name = name
        self.clock = clock
        self.machine = machine
        self.shortages = shortages or Shortages()
        self.executors: dict[
            Any, list[Callable[[], object]]
        ] = {}  # those that have a thread, or calls that wait for one
        self.disk: Any = None
        self.alive = True
        self.frozen = False
        self.thawed_s = -1.0
        self.parked: list[Handle] = []
        self.threads: set[Thread] = set()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.on_kill: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name


class Handle:
    """One thing to do, for one process."""

    __slots__ = ("args", "callback", "context", "process", "stopped", "when_s")

    def __init__(
        self,
        when_s: float,
        process: Process,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.when_s = when_s
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context
        self.stopped = False

    def cancel(self) -> None:
        self.stopped = True

    def cancelled(self) -> bool:
        return self.stopped

    def when(self) -> float:
        return self.when_s


class World:
    """The queue, the time, and the one source of chance."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self._moved_at = 0
        self._heap: list[tuple[float, int, Handle]] = []
        self._ready: deque[Handle] = deque()
        self._number = 0
        self.nature = Process("nature", Clock(self, 0.0))  # network, servers, faults: never dies
        self.current = self.nature
        self.loop = Loop(self)
        self.hub = greenlet.getcurrent()
        self.has_signals = False  # of engines' threads, ever
        self.violation: Violation | None = None
        self.troubles: list[str] = []
        self._graves: list[Any] = []

    # -- the queue ----------------------------------------------------------------------------------------------------

    def call_at(
        self,
        when_s: float,
        process: Process,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Handle:
        handle = Handle(when_s, process, callback, args, context)
        if when_s <= self.now:
            self._ready.append(handle)
        else:
            self._number += 1
            heapq.heappush(self._heap, (when_s, self._number, handle))
        return handle

    def after(self, delay_s: float, process: Process, callback: Callable[..., object], *args: Any) -> Handle:
        return self.call_at(self.now + delay_s, process, callback, *args)

    def run(self, until_s: float, done: Callable[[], bool] | None = None, steps: int = 0) -> None:
        """Do what is due until a time, or until `done` says so."""
        limit = self.steps + steps if steps else 0
        while not (limit and self.steps >= limit):
            if self._ready:
                handle = self._ready.popleft()
            elif self._heap and self._heap[0][0] <= until_s:
                when_s, _, handle = heapq.heappop(self._heap)
                if when_s > self.now:
                    self.now = when_s
                    self._moved_at = self.steps
            else:
                self.now = max(self.now, until_s)
                return
            if handle.stopped:
                continue
            process = handle.process
            if not process.alive:
                continue
            if process.frozen:
                process.parked.append(handle)
                continue
            self.current = process
            self.steps += 1
            if self.steps - self._moved_at > MOST_STEPS_AT_ONCE:
                raise Violation(f"{process} goes round and round at {self.now:.3f} s: {handle.callback!r}")
            try:
                if handle.context is None:
                    handle.callback(*handle.args)
                else:
                    handle.context.run(handle.callback, *handle.args)
            except (Killed, Violation):
                pass
            if self.violation is not None:
                raise self.violation
            if done is not None and done():
                return

    # -- processes ----------------------------------------------------------------------------------------------------

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing of it runs again. Callable from one of its own threads, which then raises Killed itself."""
        if not process.alive:
            return
        process.alive = False
        process.parked.clear()
        for thread in list(process.threads):
            if thread.greenlet is not greenlet.getcurrent():
                self._graves.append(thread.greenlet)
        self._graves.extend(process.tasks)
        for callback in process.on_kill:
            callback()

    def die(self, process: Process) -> None:
        """Kill the process whose thread calls this.

        Does not return; only the loop, which cannot stop, raises Killed.
        """
        current = greenlet.getcurrent()
        self.kill(process)
        if current is self.hub:
            raise Killed
        self._graves.append(current)
        self.hub.switch()
        raise Killed

    def freeze(self, process: Process) -> None:
        process.frozen = True

    def thaw(self, process: Process) -> None:
        process.frozen, process.thawed_s = False, self.now
        parked, process.parked = process.parked, []
        for handle in parked:
            self._ready.append(handle)

    def bury(self) -> None:
        """Unwind what was left waiting, so that nothing of it speaks up when it is collected."""
        self.current = Process("the dead", self.nature.clock)
        self.current.alive = False
        self._ready.clear()
        self._heap.clear()
        for grave in self._graves:
            for _ in range(3):
                try:
                    if isinstance(grave, asyncio.Task):
                        grave._log_destroy_pending = False  # type: ignore[attr-defined]
                        if not grave.done():
                            grave.get_coro().close()  # type: ignore[union-attr]
                    elif not grave.dead:
                        grave.throw(Killed)
                    break
                except BaseException:  # noqa: BLE001 - the dead say nothing
                    pass
        self._graves.clear()
        self._ready.clear()
        self._heap.clear()


class Loop(asyncio.AbstractEventLoop):
    """What asyncio needs of a loop, on the world's queue.

    One for all processes: a handle belongs to who scheduled it.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def time(self) -> float:
        return self._world.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        world = self._world
        handle = Handle(world.now, world.current, callback, args, context)
        world._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        world = self._world
        return world.call_at(world.now + delay, world.current, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Any:
        return self._world.call_at(when, self._world.current, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Context | None = None) -> Any:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        tasks = self._world.current.tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """At once: what is handed to an executor here is short and touches files alone.

        Its first call needs a thread.
        """
        future, process = self.create_future(), self._world.current
        late = process.executors.setdefault(executor, [])
        if late is not _HAS_THREAD:
            try:
                process.shortages.check_thread()
            except RuntimeError:
                late.append(lambda: func(*args))  # it is queued all the same, as those of the standard library do
                raise
            process.executors[executor] = _HAS_THREAD
        try:
            for call in late:
                with suppress(Exception):
                    call()
            result = func(*args)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    async def shutdown_asyncgens(self) -> None:
        return

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - asyncio's name
        return

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._world.troubles.append(f"{context.get('message')}: {error!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)


_HAS_THREAD: list[Callable[[], object]] = []  # of an executor: nothing waits for one


# -- what the code under test takes for threading, time and concurrent.futures -----------------------------------------


def _signal_here(world: World) -> Signal | None:
    """The signal that comes to the current thread at this place."""
    if not world.has_signals:
        return None
    thread = getattr(greenlet.getcurrent(), "sim_thread", None)
    signal = None if thread is None else thread.signal
    return signal if signal is not None and signal.is_here() else None


def _point(world: World) -> None:
    """A place where a signal may come to the current thread, with whatever its handler raises."""
    if world.has_signals and (signal := _signal_here(world)) is not None:
        signal.come()


class Waiter:
    """The current thread, waiting."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._greenlet = greenlet.getcurrent()
        self._process = world.current
        self.fired = False
        self._over = self._is_late = False
        self._timer: Handle | None = None

    def wait(self, timeout_s: float | None) -> bool:
        """Give way until fired;

        False when it was the timeout. Raises what a signal's handler does that comes meanwhile.
        """
        world = self._world
        if self._greenlet is world.hub:
            raise SimulatorError("the loop would block")
        signal = _signal_here(world)
        if timeout_s is not None:
            self._timer = world.after(max(0.0, timeout_s), self._process, self._time_out)
        if signal is not None:
            world.after(signal.after_s, self._process, self._wake)
        try:
            if signal is not None:
                self._give_way()
                signal.come()
            while not (self.fired or self._is_late):  # a handler that has waited itself may have been woken for this
                self._give_way()
        finally:
            self._over = True
            if self._timer is not None:
                self._timer.stopped = True
        return self.fired

    def _give_way(self) -> None:
        self._world.hub.switch()
        if not self._process.alive:
            raise Killed
        self._world.current = self._process

    def _time_out(self) -> None:
        self._is_late = True
        self._switch()

    def _switch(self) -> None:
        if self._greenlet.parent is not self._world.hub:
            self._greenlet.parent = self._world.hub
        self._greenlet.switch()

    def fire(self) -> None:
        if not self.fired and not self._over:
            self.fired = True
            if self._timer is not None:
                self._timer.stopped = True
            self._world.call_at(self._world.now, self._process, self._wake)

    def _wake(self) -> None:
        if not self._over:
            self._switch()


class Threading:
    """Stands for the module `threading`."""

    @property
    def _world(self) -> World:
        return INSTALLED.world

    def Lock(self) -> Lock:
        return Lock(self._world)

    def RLock(self) -> RLock:
        return RLock(self._world)

    def Condition(self, lock: Lock | None = None) -> Condition:
        return Condition(self._world, lock)

    def Event(self) -> Event:
        return Event(self._world)

    def Thread(self, *args: Any, **kwargs: Any) -> Thread:
        thread = Thread(self._world, *args, **kwargs)
        thread.may_lack = True
        return thread

    def current_thread(self) -> Any:
        return getattr(greenlet.getcurrent(), "sim_thread", None)

    def get_ident(self) -> int:
        """Of the current thread; the loop's is 0."""
        thread = getattr(greenlet.getcurrent(), "sim_thread", None)
        return 0 if thread is None else id(thread)


class Lock:
    def __init__(self, world: World) -> None:
        self._world = world
        self._locked = False
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        _point(self._world)
        return self._take(blocking, timeout)

    def _take(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._locked:
            if not blocking:
                return False
            waiter = Waiter(self._world)
            self._waiters.append(waiter)
            if not waiter.wait(None if timeout < 0 else timeout) and timeout >= 0:
                return False
        self._locked = True
        return True

    def release(self) -> None:
        self._locked = False
        while self._waiters:
            self._waiters.popleft().fire()

    def locked(self) -> bool:
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._locked and self._owner is greenlet.getcurrent():
            self._depth += 1
            return True
        _point(self._world)
        return self._take(blocking, timeout)

    def _take(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = super()._take(blocking, timeout)
        if taken:
            self._owner, self._depth = greenlet.getcurrent(), 1
        return taken

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            super().release()


class Condition:
    def __init__(self, world: World, lock: Lock | None = None) -> None:
        self._world = world
        self._lock = lock or RLock(world)
        self._waiters: list[Waiter] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        waiter = Waiter(self._world)
        self._waiters.append(waiter)
        self._lock.release()
        try:
            return waiter.wait(timeout)
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._lock._take()  # whatever comes: its `with` gives it back

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end_s = None if timeout is None else self._world.now + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._world.now
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for waiter in self._waiters[:n]:
            waiter.fire()
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fire()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        waiter = Waiter(self._world)
        self._waiters.append(waiter)
        fired = waiter.wait(timeout)
        if not fired and waiter in self._waiters:
            self._waiters.remove(waiter)
        return fired or self._set


class _ThreadGreenlet(greenlet.greenlet):
    sim_thread: Thread


class Thread:
    """Stands for `threading.Thread`.

    Attributes:
        may_lack: it is one of the code under test, which the system may refuse.
        signal: what comes to it.
    """

    def __init__(
        self,
        world: World,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._world = world
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self.name = name or "thread"
        self.ident: int | None = None
        self.may_lack = False
        self.signal: Signal | None = None
        self.daemon = daemon
        self._started = False
        self._over = Event(world)
        self.process = world.current
        self.greenlet = _ThreadGreenlet(self._main, world.hub)
        self.greenlet.sim_thread = self

    def start(self) -> None:
        if self.may_lack:
            self._world.current.shortages.check_thread()
        self.process = self._world.current
        self.process.threads.add(self)
        self._started, self.ident = True, id(self)
        self._world.call_at(self._world.now, self.process, self.greenlet.switch)

    def _main(self) -> None:
        self._world.current = self.process
        try:
            if self._target is not None:
                self._target(*self._args, **self._kwargs)
        except (Killed, greenlet.GreenletExit):
            return
        except Violation:
            return
        except BaseException as error:  # noqa: BLE001 - no thread of the code under test may end so
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            Violation(f"thread {self.name} of {self.process} ended with {error!r}\n{where}")
        finally:
            self.process.threads.discard(self)
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        if not self._started:
            raise RuntimeError("cannot join thread before it is started")
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        return self._started and not self._over.is_set()


class Time:
    """Stands for the module `time`: the clocks of the machine whose process runs now."""

    @property
    def _world(self) -> World:
        return INSTALLED.world

    def monotonic(self) -> float:
        world = self._world
        _point(world)
        return world.current.clock.monotonic()

    perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def time(self) -> float:
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        return self._world.current.clock.wall_ns()

    def sleep(self, seconds: float) -> None:
        Waiter(self._world).wait(seconds)

    def strftime(self, *args: Any) -> str:
        return "19700101T000000Z"

    def gmtime(self, *args: Any) -> None:
        return None


class Executor:
    """Stands for `ThreadPoolExecutor`."""

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "", **_: Any) -> None:
        self._world = INSTALLED.world
        self._room = max_workers or 1
        self._name = thread_name_prefix
        self._queue: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        self._queue.append((future, fn, args))
        if self._room:
            thread = Thread(self._world, target=self._work, name=self._name)
            thread.may_lack = True
            thread.start()  # where there is none the call stays queued, as in the standard library
            self._room -= 1
        return future

    def _work(self) -> None:
        while self._queue:
            future, fn, args = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(*args))
            except Exception as error:  # noqa: BLE001 - it is the future's
                future.set_exception(error)
        self._room += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            for future, _, _ in self._queue:
                future.cancel()


def wait_futures(
    futures: Iterable[Future[Any]], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> tuple[set[Future[Any]], set[Future[Any]]]:
    """Stands for `concurrent.futures.wait`."""
    world, given = INSTALLED.world, list(futures)
    left = [future for future in given if not future.done()]
    if left and (return_when == ALL_COMPLETED or len(left) == len(given)):
        waiter = Waiter(world)
        count = len(left) if return_when == ALL_COMPLETED else 1

        def one(_: Future[Any]) -> None:
            nonlocal count
            count -= 1
            if not count:
                waiter.fire()

        for future in left:
            future.add_done_callback(one)
        waiter.wait(timeout)
    done = {future for future in given if future.done()}
    return done, set(given) - done


RUNNER: ContextVar[CoroutineRunner | None] = ContextVar("runner", default=None)  # whose loop a task has


def run_coroutine(coroutine: Coroutine[Any, Any, Any], **_: Any) -> Any:
    """Stands for `asyncio.run`: the coroutine becomes a task of the world's loop, and this thread waits for it."""
    with ExitStack() as opened:
        try:
            runner = opened.enter_context(CoroutineRunner())
        except OSError:
            coroutine.close()
            raise
        return runner.run(coroutine)


class CoroutineRunner:
    """Stands for `asyncio.Runner`.

    A loop needs descriptors; to end its resolver, if that was asked, it needs a thread.
    """

    def __enter__(self) -> CoroutineRunner:
        INSTALLED.world.current.shortages.check_descriptor("a loop")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        process = INSTALLED.world.current
        is_dead = kind is not None and not issubclass(kind, Exception)
        if process.executors.pop(self, None) is not None and not is_dead:
            process.shortages.check_thread()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """See `asyncio.Runner.run`."""
        world, context = INSTALLED.world, copy_context()
        context.run(RUNNER.set, self)
        task = world.loop.create_task(coroutine, context=context)
        if not task.done():
            waiter = Waiter(world)
            task.add_done_callback(lambda _: waiter.fire())
            waiter.wait(None)
        return task.result()
