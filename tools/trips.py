"""What trips of one block cost in Python: the files of kvbm it crosses, how often it comes back to one, the calls, the
threads.

python tools/trips.py               create → the catalog's index → its answers; NVME → HBM; create → an object,
                                    also by way of HOST
python tools/trips.py --root PATH   the same of another checkout, run by that checkout's own interpreter
python tools/trips.py --calls       ... and every function with how often each trip calls it

Everything runs in one process, with a nats-server beside it. Each trip is made several times. A call counts as often as
every one of them made it, less what an idle time of the same length makes: timers drop out. A call from another file
enters its file; what enters it after the first is a re-entry. Names are looked for in all of kvbm, so the program runs
on any arrangement of its modules.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

BLOCK_BYTES = 65_536
TRIPS = 7
SETTLE_S = 0.5  # a trip is over then, whatever threads take part in it

Call = tuple[str, str, str, bool]  # thread, file, function, whether it comes from another file


class Trip(NamedTuple):
    """One row of the table."""

    name: str
    calls: Counter[Call]


class Recorder:
    """Counts the calls of functions of kvbm in all threads that begin after it was made, while it is on."""

    def __init__(self, package: Path) -> None:
        self._root, self._on = f"{package}{os.sep}", False
        self._calls: Counter[Call] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(self._root):
            thread = re.sub(r"[-_ ]*[0-9a-f]*\d+.*$", "", threading.current_thread().name) or "?"
            caller = frame.f_back
            enters = caller is None or caller.f_code.co_filename != code.co_filename
            self._calls[thread, code.co_filename[len(self._root) :], code.co_qualname, enters] += 1

    @contextmanager
    def on(self) -> Iterator[Counter[Call]]:
        """Fills the counter at the end."""
        self._calls = Counter()
        found: Counter[Call] = Counter()
        self._on = True
        try:
            yield found
        finally:
            self._on = False
            found.update(self._calls)


def measured(recorder: Recorder, trip: Callable[[int], object]) -> Counter[Call]:
    """The calls that every one of some trips makes, and idling does not.

    Args:
        trip: makes the trip of one block; it gets a number that was not used before.
    """
    trip(0)  # what is made once
    time.sleep(SETTLE_S)
    taken, idled = [], []
    for number in range(1, TRIPS + 1):
        begin = time.monotonic()
        with recorder.on() as calls:
            trip(number)
            time.sleep(SETTLE_S * (1 + number / 23))  # no timer keeps step with it
        taken.append(calls)
        length_s = time.monotonic() - begin
        with recorder.on() as calls:
            time.sleep(length_s)
        idled.append(calls)
    always = Counter({call: min(calls[call] for calls in taken) for call in taken[0]})
    idle = Counter({call: sorted(calls[call] for calls in idled)[len(idled) // 2] for call in always})
    return always - idle


def finder() -> Callable[[str], Any]:
    """Finds a class or a value of kvbm by its name, wherever it is defined."""
    import kvbm

    modules = []
    for info in pkgutil.walk_packages(kvbm.__path__, "kvbm."):
        if "engines.vllm" not in info.name and not info.name.endswith("__main__"):
            with suppress(ImportError):
                modules.append(importlib.import_module(info.name))

    def find(name: str) -> Any:
        owners = [module for module in modules if hasattr(module, name)]
        defined = [module for module in owners if getattr(getattr(module, name), "__module__", "") == module.__name__]
        if not owners:
            raise SystemExit(f"nothing in kvbm is called {name}")
        return getattr((defined or owners)[0], name)

    return find


class Blocks:
    """Blocks of prompts of one block each, created in a manager."""

    def __init__(self, manager: Any, namespace: Any, no_parent: bytes, name: str) -> None:
        self._manager, self._namespace, self._no_parent, self._name = manager, namespace, no_parent, name

    def hash_of(self, number: int) -> bytes:
        return hashlib.sha256(f"{self._name}/{number}".encode()).digest()[:16]

    def create(self, number: int) -> None:
        slots = self._manager.allocate(1)
        assert slots is not None
        held = self._manager.create(self._namespace.id, self._no_parent, 0, self.hash_of(number), slots)
        self._manager.unpin(held)


def to_the_catalog(recorder: Recorder, find: Callable[[str], Any], folder: Path) -> list[Trip]:
    """create → the catalog's index, and the index → an answer over HTTP."""
    import kvbm

    with ExitStack() as opened:
        server = find("EmbeddedServer").start(folder / "nats")
        opened.callback(server.stop)
        settings_type = find("ServiceSettings")
        wished = {
            "nats_url": server.url,
            "database_url": f"sqlite+aiosqlite:///{folder / 'catalog.db'}",
            "listen": "127.0.0.1:0",
            "whole_wait_s": 0.2,
            "store_every_s": 3600.0,  # SQL is beside the trip
        }
        service = settings_type(
            **{key: value for key, value in wished.items() if key in settings_type.__struct_fields__}
        )
        catalog = find("CatalogThread")(service, find("NATIVE"), find("NATIVE_INDEX"))
        catalog.start()
        opened.callback(catalog.stop)
        client = kvbm.CatalogClient(catalog.url)
        opened.callback(client.close)
        client.wait_ready(30.0)
        flags = {
            "instance.data_dir": str(folder),
            "nats.url": server.url,
            "nats.heartbeat_s": 1.7,  # in step with no trip
            "pools.hbm.device": "cpu",
            "pools.hbm.slots": 64,
        }
        namespace = kvbm.Namespace(model="trip", revision="1", block_tokens=16)
        manager = kvbm.open_manager(kvbm.load_settings(flags=flags), [namespace], BLOCK_BYTES)
        opened.callback(manager.close)
        blocks = Blocks(manager, namespace, kvbm.NO_PARENT, "catalog")
        made = measured(recorder, blocks.create)

        def look(number: int) -> None:
            answer = client.lookup(namespace, blocks.hash_of(number))
            assert max(found.depth for found in answer.instances) == 1, answer

        def ask_where(number: int) -> None:
            assert client.route(namespace, blocks.hash_of(number), 16).instance

        return [
            Trip("create → the catalog's index", made),
            Trip("lookup → answer (HTTP)", measured(recorder, look)),
            Trip("route → answer (HTTP)", measured(recorder, ask_where)),
        ]


def from_nvme(recorder: Recorder, find: Callable[[str], Any], folder: Path) -> list[Trip]:
    """acquire of a block that lies in NVME alone."""
    import kvbm

    flags = {
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 32,
        "pools.nvme.slots": 32,
        "pools.nvme.direct": "auto",
        "offload.nvme": "write_through",
    }
    namespace = kvbm.Namespace(model="trip", revision="1", block_tokens=16)
    settings = kvbm.load_settings(flags=flags)
    with kvbm.open_manager(settings, [namespace], BLOCK_BYTES) as manager:
        blocks = Blocks(manager, namespace, kvbm.NO_PARENT, "nvme")
        for number in range(TRIPS + 1):
            blocks.create(number)
        time.sleep(3.0)
    with kvbm.open_manager(settings, [namespace], BLOCK_BYTES) as manager:

        def bring(number: int) -> None:
            prefix = manager.acquire(namespace.id, blocks.hash_of(number), 10.0)  # stays pinned
            assert prefix.depth == 1, "the block did not reach NVME before the restart"

        whole = measured(recorder, bring)
        readers = {thread for thread, file, *_ in whole if "nvme" in file} | {threading.current_thread().name}
        until_read = Counter({call: count for call, count in whole.items() if call[0] in readers})
        return [Trip("NVME → HBM", until_read), Trip("... with its events in the journal", whole)]


def to_objects(recorder: Recorder, find: Callable[[str], Any], folder: Path) -> list[Trip]:
    """create of a block that is put into a store of objects: from HBM, and by way of HOST."""
    return [
        Trip("create → OBJECT put", _to_objects(recorder, find, folder / "hbm", {})),
        Trip(
            "create → HOST → OBJECT put",
            _to_objects(recorder, find, folder / "host", {"pools.host.slots": 64, "offload.host": "write_through"}),
        ),
    ]


def _to_objects(recorder: Recorder, find: Callable[[str], Any], folder: Path, more: dict[str, Any]) -> Counter[Call]:
    import kvbm

    store = find("MemoryStore")()
    objects = find("BlockObjects")(store, BLOCK_BYTES, find("NATIVE").checksums, find("CODER"))
    flags = {
        "instance.data_dir": str(folder),
        "nats.enabled": False,
        "pools.hbm.device": "cpu",
        "pools.hbm.slots": 64,
        "offload.object": "write_through",
        **more,
    }
    namespace = kvbm.Namespace(model="trip", revision="1", block_tokens=16)
    with kvbm.open_manager(kvbm.load_settings(flags=flags), [namespace], BLOCK_BYTES, object_pool=objects) as manager:
        blocks = Blocks(manager, namespace, kvbm.NO_PARENT, "object")
        made = measured(recorder, blocks.create)
        assert len(store.objects) == TRIPS + 1, f"{len(store.objects)} objects of {TRIPS + 1} were put"
    objects.close()
    return made


def table(trips: list[Trip]) -> Iterator[str]:
    """Rows for a page of Markdown."""
    yield "| trip | files of kvbm | re-entries | Python calls | threads |"
    yield "|---|---|---|---|---|"
    for trip in trips:
        files, threads = {call[1] for call in trip.calls}, {call[0] for call in trip.calls}
        again = sum(count for call, count in trip.calls.items() if call[3]) - len(files)
        yield f"| {trip.name} | {len(files)} | {again} | {trip.calls.total()} | {len(threads)} |"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=None, help="another checkout, with a .venv of its own")
    parser.add_argument("--calls", action="store_true", help="print every function")
    options = parser.parse_args()
    if options.root is not None:
        command = [str(options.root / ".venv" / "bin" / "python"), str(Path(__file__).resolve())]
        command += ["--calls"] if options.calls else []
        return subprocess.run(
            command, cwd=options.root, check=False, env=os.environ | {"PYTHONPATH": str(options.root)}
        ).returncode
    sys.path.insert(0, os.getcwd())
    import kvbm

    recorder = Recorder(Path(kvbm.__file__).parent)
    find, trips = finder(), list[Trip]()
    for make in (to_the_catalog, from_nvme, to_objects):
        with tempfile.TemporaryDirectory(prefix="kvbm-trips-") as folder:
            trips += make(recorder, find, Path(folder))
    print("\n".join(table(trips)))
    for trip in trips:
        print(f"\n{trip.name}: {', '.join(sorted({call[1] for call in trip.calls}))}")
        for (thread, file, function, enters), count in sorted(trip.calls.items()) if options.calls else ():
            print(f"  {count:4}  {thread:16} {'→ ' if enters else '  '}{file}:{function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
