"""The data plane of stores that speak HTTP: whole runs through obstore, a bounded number of requests in flight.

One thread with an event loop carries every request of a store, because there a request can be dropped the moment its
deadline passes. Bytes neither cross that thread nor are copied: a put sends from the caller's buffers, a get hands on
the buffer that was received into, unless it was read in several ranges. The handle (credentials, bucket, region) is
that of s3.py and azure.py.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as LateError
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from kvbm.core.errors import ConfigError, MissingExtraError, PoolError
from kvbm.pools.stores.base import Body, DirectRequests, Get, Got, Listed, Put, Refusal, StoreTrouble
from kvbm.pools.stores.direct import DirectPlaces, DirectSigner
from kvbm.pools.stores.link import RequestLimits, first_line

if TYPE_CHECKING:
    from obstore import GetOptions, ListStream, ObjectMeta, PutMode
    from obstore.store import AzureStore, RetryConfig, S3Store

PART_BYTES = 4 << 20  # of a range, where a large part is read in several; from two of them on
_ATTEMPTS = 4  # of one request, within the deadline of its call
_FIRST_DELAY_S = 0.05  # before the second attempt at most; twice that before the next
_LONGEST_DELAY_S = 1.0
_DELETES = 1000  # names of one request
_PAGE = 1000  # names of one page of a listing
_LATE_S = 2.0  # after its deadline a call's end is certain; only a process that is starved of its CPU gets here
_STOP_S = 5.0

# of a request; of one name in a request of many
_STATUS = re.compile(r"(?:status code: |\(code: )(\d{3}) ?([A-Za-z ]*)")
_BEYOND = re.compile(r"Wanted range starting at")  # some stores send the end of an object where nothing is left of it
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>|\"code\": ?\"([A-Za-z0-9]+)\"")
_KIND = re.compile(r"kind: (Timeout|Connect|Interrupted|Decode|Request|Unknown)")
_UNTRUSTED = re.compile(r"InvalidCertificate\(\s*(\w+)")
_EARLY = re.compile(r"IncompleteBody|IncompleteMessage|UnexpectedEof|ConnectionReset|BrokenPipe|ConnectionAborted")
_IN_BODY = re.compile(r"kind: (Body|Decode)")
_CLOCK = ("RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "NoSuchContainer")
_CREDENTIAL_CODES = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "InvalidAccessKeyId")
_THERE = ("BlobAlreadyExists", "ConditionNotMet", "PreconditionFailed")
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
# Of a store that knows no conditional put: 501, or 400 with words of its own about the request. Amazon's 400s of other
# kinds are none of them.
_NO_CONDITION = (400, 501)
_NO_CONDITION_CODES = (
    "",
    "InvalidArgument",
    "InvalidRequest",
    "NotImplemented",
    "UnsupportedHeader",
    "UnsupportedOperation",
)
_PASSING_CODES = ("RequestTimeout", "IncompleteBody", "InternalError", "ServiceUnavailable", "SlowDown")

Answer = TypeVar("Answer")
Client = TypeVar("Client")
_Pages: TypeAlias = "ListStream[Sequence[ObjectMeta]]"


class _Failure(NamedTuple):
    """A refusal, and what it means for the next attempt.

    Attributes:
        status: of HTTP, 0 for no answer.
        again: whether a retry may help.
        code: the store's word for it, "" without one.
    """

    trouble: StoreTrouble
    words: str
    status: int
    again: bool
    attempts: int = 1
    code: str = ""

    @property
    def knows_no_condition(self) -> bool:
        """Whether the store may have refused the condition of a put, not the put."""
        known = self.status in _NO_CONDITION and (self.status != 400 or self.code in _NO_CONDITION_CODES)
        return known and self.trouble is not StoreTrouble.DENIED

    def refusal(self) -> Refusal:
        """As a caller sees it."""
        return Refusal(
            self.trouble, f"{self.words} after {self.attempts} attempts" if self.attempts > 1 else self.words
        )


class BlobStore:
    """See the module; the promises are those of `ObjectStore`. Methods: any thread.

    Attributes:
        conditional: false once the store has said or shown that it knows no conditional put; then each put is preceded
            by a question.
        remarks: what is worth saying once about the bucket, in sentences.
        expiry_days: after how many days the bucket's own lifecycle deletes what lies under the prefix; None: it does
            not, or does not say.
    """

    def __init__(
        self,
        name: str,
        blobs: S3Store | AzureStore,
        limits: RequestLimits,
        *,
        deleting_singly: S3Store | AzureStore | None = None,
        signer: DirectSigner | None = None,
        on_close: Callable[[], None] = lambda: None,
        remarks: tuple[str, ...] = (),
        expiry_days: int | None = None,
    ) -> None:
        """Start the thread; `blobs` has been made with a link's `client_options` and `NO_RETRIES`.

        Args:
            deleting_singly: the same, deleting one name a request, for stores that cannot delete many.
            signer: of requests that others send; None: nobody does.
        """
        import obstore

        self.name = name
        self.forgets = False
        self.remarks = remarks
        self.expiry_days = expiry_days
        self._obstore = obstore
        self._blobs = blobs
        self._deleting_singly = deleting_singly or blobs
        self._signer = signer
        self._most_in_flight = limits.requests_in_flight
        self._on_close = on_close
        self.conditional = True  # until the store says it knows no conditional put
        self._compares = True  # … or shows that it knows no put over one ETag alone
        self._lock = threading.Lock()
        self._closed = False
        self._free = asyncio.Semaphore(limits.requests_in_flight)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvbm-objects", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            raise

    def put(self, puts: Sequence[Put], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.put`."""
        return self._run([self._put_one(put) for put in puts], deadline_s)

    def get(self, gets: Sequence[Get], deadline_s: float) -> list[Got | Refusal]:
        """As `ObjectStore.get`. A part that is probably two times `PART_BYTES` or more is read in parallel ranges."""
        return self._run([self._get_one(get) for get in gets], deadline_s)

    @contextmanager
    def direct(self, names: Sequence[str], expected_bytes: int, deadline_s: float) -> Iterator[DirectRequests | None]:
        """As `DirectStore.direct`. A few large objects are left to `get`, which reads each in parallel ranges."""
        if self._signer is None or (expected_bytes >= 2 * PART_BYTES and len(names) < self._most_in_flight):
            yield None
            return
        places = DirectPlaces(self._free)
        try:
            [answer] = self._run([self._direct_requests(self._signer, names, places)], deadline_s)
            yield answer if isinstance(answer, DirectRequests) else None
        finally:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(places.leave)

    def delete(self, names: Sequence[str], deadline_s: float) -> list[Refusal | None]:
        """As `ObjectStore.delete`, many names a request where the store can."""
        runs = [names[at : at + _DELETES] for at in range(0, len(names), _DELETES)]
        answers = self._run([self._delete_run(run) for run in runs], deadline_s)
        flat: list[Refusal | None] = []
        for run, answer in zip(runs, answers, strict=True):
            flat += [answer] * len(run) if isinstance(answer, Refusal) else answer
        return flat

    def listed(self, prefix: str, deadline_s: float, after: str = "") -> Iterator[Listed]:
        """As `ObjectStore.listed`. A page that fails is asked for again, from the last name that was given out."""
        attempt = 1
        while True:
            pages = self._pages(prefix, after)
            while True:
                [page] = self._run([_next_page(pages)], deadline_s)
                if isinstance(page, Refusal):
                    raise PoolError(f"{self.name}: listing {prefix!r} behind {after!r}: {page.words}")
                if isinstance(page, _Failure):
                    break
                if not page:
                    return
                attempt = 1
                for meta in page:
                    if meta["path"] <= after:
                        continue  # some stores know no beginning and send all
                    after = meta["path"]
                    if after.startswith(prefix):
                        yield _listed(meta)
                    elif after > prefix:
                        return  # names come in order
            if not page.again or attempt == _ATTEMPTS:
                words = page._replace(attempts=attempt).refusal().words
                raise PoolError(f"{self.name}: listing {prefix!r} behind {after!r}: {words}")
            time.sleep(_delay_s(attempt))
            attempt += 1

    def replace(self, name: str, body: Body, expected: Body | None, deadline_s: float) -> Refusal | None:
        """As `ObjectStore.replace`, by the object's ETag. The store must know conditional puts."""
        [answer] = self._run([self._replace(name, body, expected)], deadline_s)
        return answer

    def ignored_conditions(self, name: str, deadline_s: float) -> tuple[str, ...] | Refusal:
        """As `ObjectStore.ignored_conditions`.

        What it shows is heeded from then on: `put` and `replace` ask before they put.
        """
        [answer] = self._run([self._ignored_conditions(name)], deadline_s)
        self._run([self._delete_one(name)], deadline_s)
        return answer

    def close(self) -> None:
        """As `ObjectStore.close`: what is under way is dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._on_close()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _run(self, works: Sequence[Coroutine[Any, Any, Answer]], deadline_s: float) -> list[Answer | Refusal]:
        """What each coroutine gives, SILENT for those that the deadline cut off.

        The loop runs them; this thread waits.
        """
        with self._lock:
            ended = self._closed
            if not ended:
                future = asyncio.run_coroutine_threadsafe(_until(works, deadline_s), self._loop)
        if not ended:
            try:
                return future.result(deadline_s + _LATE_S)
            except LateError:
                future.cancel()
                return [_late(deadline_s)] * len(works)
            except CancelledError:
                pass  # it was closed meanwhile
        for work in works:
            work.close()
        return [Refusal(StoreTrouble.SILENT, "the store is closed here")] * len(works)

    def _stop(self) -> None:
        """Loop only: drop what runs, and end the loop once that is gone."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()

        async def end() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        self._ending = self._loop.create_task(end())

    async def _ask(self, request: Callable[[], Awaitable[Answer]]) -> Answer | _Failure:
        """One request, again where that can help, with full jitter between.

        The deadline is the caller's: it cancels.
        """
        attempt = 1
        while True:
            async with self._free:
                answer = await _attempt(request)
            if not isinstance(answer, _Failure) or not answer.again or attempt == _ATTEMPTS:
                break
            await asyncio.sleep(_delay_s(attempt))
            attempt += 1
        return answer._replace(attempts=attempt) if isinstance(answer, _Failure) else answer

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _put_one(self, put: Put) -> Refusal | None:
        if not self.conditional:
            return await self._put_looking_first(put)
        answer = await self._create(put.name, put.body)
        if not isinstance(answer, _Failure):
            return None
        if not answer.knows_no_condition:
            return answer.refusal()
        refusal = await self._put_looking_first(put)
        if refusal is None:  # without the condition it was taken; another put at the same time may say nothing of that
            self.conditional = False
        return refusal

    async def _put_looking_first(self, put: Put) -> Refusal | None:
        """The put of a store that knows no conditions. Two at once store the same content twice, which is harmless."""
        found = await self._head(put.name)
        if not isinstance(found, _Failure):
            return Refusal(StoreTrouble.TAKEN, f"{put.name} is there")
        if found.trouble is not StoreTrouble.ABSENT:
            return found.refusal()
        body = _sent(put.body)
        answer = await self._ask(lambda: self._obstore.put_async(self._blobs, put.name, body, use_multipart=False))
        return answer.refusal() if isinstance(answer, _Failure) else None

    async def _direct_requests(
        self, signer: DirectSigner, names: Sequence[str], places: DirectPlaces
    ) -> DirectRequests | _Failure | None:
        if not await places.take(min(len(names), self._most_in_flight)):
            return None
        return await _attempt(lambda: signer.requests(names, places.taken))

    async def _get_one(self, get: Get) -> Got | Refusal:
        wanted = get.expected_bytes if get.count is None else min(get.count, get.expected_bytes or get.count)
        if get.count != 0 and wanted >= 2 * PART_BYTES:
            return await self._get_ranges(get, wanted)
        return await self._get_range(get)

    async def _get_ranges(self, get: Get, wanted: int) -> Got | Refusal:
        """The parts of one object side by side.

        The last one goes to the end of what was asked for, should it be longer than expected.
        """
        firsts = range(get.first, get.first + wanted - PART_BYTES + 1, PART_BYTES)
        counts: list[int | None] = [PART_BYTES] * (len(firsts) - 1)
        counts.append(None if get.count is None else get.first + get.count - firsts[-1])
        parts = await asyncio.gather(
            *(
                self._get_range(get._replace(first=first, count=count))
                for first, count in zip(firsts, counts, strict=True)
            )
        )
        body, sizes = bytearray(), set()
        for part in parts:
            if isinstance(part, Refusal):
                return part
            body += part.body
            sizes.add(part.size_bytes)
        if len(sizes) > 1:
            return Refusal(StoreTrouble.REFUSED, f"{get.name} changed while it was read in {len(parts)} ranges")
        return Got(body, sizes.pop())

    async def _get_range(self, get: Get) -> Got | Refusal:
        """One range by one request; two where the store has to be asked how long the object is.

        Too long a body is not received.
        """
        name, first, count = get.name, get.first, get.count
        if count == 0:
            return await self._nothing_of(name)
        options: GetOptions = {}
        if count is not None:
            options["range"] = (first, first + count)
        elif first:
            options["range"] = {"offset": first}

        async def read() -> Got | Refusal:
            answer = await self._obstore.get_async(self._blobs, name, options=options)
            too_large = get.refuse(answer.range[1] - answer.range[0])
            if too_large is not None:
                return too_large
            body = memoryview(await answer.bytes_async())
            begin, end = answer.range
            if len(body) != end - begin:
                raise ConnectionResetError(f"{len(body)} of {end - begin} bytes came")
            return Got(body, answer.meta["size"])

        answer = await self._ask(read)
        if not isinstance(answer, _Failure):
            return answer
        return await self._nothing_of(name) if answer.status == 416 else answer.refusal()

    async def _nothing_of(self, name: str) -> Got | Refusal:
        found = await self._head(name)
        return found.refusal() if isinstance(found, _Failure) else Got(b"", found["size"])

    async def _delete_run(self, names: Sequence[str]) -> list[Refusal | None]:
        """Many at once; one by one where that is refused, because only then each has an answer of its own."""
        if len(names) > 1:
            answer = await self._ask(lambda: self._obstore.delete_async(self._blobs, names))
            if not isinstance(answer, _Failure):
                return [None] * len(names)
            if answer.trouble in (StoreTrouble.DENIED, StoreTrouble.SILENT):
                return [answer.refusal()] * len(names)
        return list(await asyncio.gather(*(self._delete_one(name) for name in names)))

    async def _delete_one(self, name: str) -> Refusal | None:
        answer = await self._ask(lambda: self._obstore.delete_async(self._deleting_singly, name))
        if not isinstance(answer, _Failure) or answer.trouble is StoreTrouble.ABSENT:
            return None
        return answer.refusal()

    async def _ignored_conditions(self, name: str) -> tuple[str, ...] | Refusal:
        """See `ignored_conditions`: each condition is tried where it holds and where it does not."""
        ignored: list[str] = []
        answer = await self._create(name, b"1")
        if (
            isinstance(answer, _Failure) and answer.trouble is not StoreTrouble.TAKEN
        ):  # that it is there is an earlier attempt's
            if not answer.knows_no_condition:
                return answer.refusal()
            self.conditional = False
            ignored.append(f"a put where nothing has the name (If-None-Match: *) is refused: {answer.words}")
            refusal = await self._put_looking_first(Put(name, b"1"))
            if refusal is not None:
                return refusal
        else:
            answer = await self._create(name, b"2")
            if not isinstance(answer, _Failure):
                self.conditional = False
                ignored.append("a put where nothing has the name (If-None-Match: *) is done where something has it")
            elif answer.trouble is not StoreTrouble.TAKEN:
                return answer.refusal()
        held = await self._held(name, 1)
        if isinstance(held, _Failure):
            return held.refusal()
        self._compares = True
        answer = await self._put_where(name, b"3", held)
        if isinstance(answer, _Failure) and answer.knows_no_condition:
            self._compares = False
            return (*ignored, f"a put over one ETag alone (If-Match) is refused: {answer.words}")
        if isinstance(answer, _Failure):
            return answer.refusal()
        answer = await self._put_where(name, b"4", held)
        if not isinstance(answer, _Failure):
            self._compares = False
            ignored.append("a put over one ETag alone (If-Match) is done over another")
        elif answer.trouble not in (StoreTrouble.TAKEN, StoreTrouble.ABSENT):
            return answer.refusal()
        return tuple(ignored)

    async def _replace(self, name: str, body: Body, expected: Body | None) -> Refusal | None:
        if expected is None and not self.conditional:
            return await self._put_looking_first(Put(name, body))
        if expected is None:
            answer = await self._create(name, body)
        else:
            held = await self._held(name, memoryview(expected).nbytes)
            if isinstance(held, _Failure):
                absent = held.trouble is StoreTrouble.ABSENT
                return Refusal(StoreTrouble.TAKEN, f"{name} is gone") if absent else held.refusal()
            if held[0] != bytes(expected):
                return Refusal(StoreTrouble.TAKEN, f"{name} has changed")
            answer = await self._put_where(name, body, held)
        if not isinstance(answer, _Failure):
            return None
        if answer.attempts > 1:  # an earlier attempt may have done it, whatever became of its answer
            now = await self._held(name, memoryview(body).nbytes)
            if not isinstance(now, _Failure) and now[0] == bytes(body):
                return None
        if answer.trouble is StoreTrouble.ABSENT:  # it was deleted meanwhile
            return Refusal(StoreTrouble.TAKEN, f"{name} is gone")
        return answer.refusal()

    async def _put_where(self, name: str, body: Body, held: tuple[bytes, str]) -> object:
        """Put over what has these bytes and this ETag alone; over anything, where the store has shown that it compares
        none.
        """
        found, tag = held
        answer = await self._put_over(name, body, tag)
        if isinstance(answer, _Failure) and answer.status == 412 and await self._held(name, len(found)) == held:
            answer = await self._put_over(name, body, tag.strip('"'))  # Ceph 16 compares without the quotes
        return answer

    async def _put_over(self, name: str, body: Body, tag: str) -> object:
        mode: PutMode = {"e_tag": tag} if self._compares else "overwrite"
        return await self._ask(
            lambda: self._obstore.put_async(self._blobs, name, _flat(body), use_multipart=False, mode=mode)
        )

    async def _held(self, name: str, most_bytes: int) -> tuple[bytes, str] | _Failure:
        """A small object's bytes and ETag, of one answer.

        None of a larger one's bytes are read, and nothing equals them.
        """

        async def read() -> tuple[bytes, str]:
            answer = await self._obstore.get_async(self._blobs, name)
            is_larger = answer.meta["size"] > most_bytes
            return _LARGER if is_larger else bytes(await answer.bytes_async()), answer.meta["e_tag"] or ""

        return await self._ask(read)

    async def _create(self, name: str, body: Body | tuple[Body, ...]) -> object:
        sent = _sent(body)
        return await self._ask(
            lambda: self._obstore.put_async(self._blobs, name, sent, use_multipart=False, mode="create")
        )

    async def _head(self, name: str) -> ObjectMeta | _Failure:
        return await self._ask(lambda: self._obstore.head_async(self._blobs, name))

    def _pages(self, prefix: str, after: str) -> _Pages:
        """Pages below the prefix's folder: the client lists by whole folders."""
        folder, slash, _ = prefix.rpartition("/")
        return self._obstore.list(self._blobs, folder if slash else None, offset=after or None, chunk_size=_PAGE)


_LARGER = b"\0kvbm: larger than what is compared with it"
NO_RETRIES: RetryConfig = {"max_retries": 0}  # the retries are ours: they count, jitter and heed the deadline


def made(name: str, make: Callable[[], Client]) -> Client:
    """A client of obstore's. Raises ConfigError: it refuses what it was given, such as a key that is none."""
    from obstore.exceptions import BaseError

    try:
        return make()
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"OBJECT pool {name}: its client cannot be made ({first_line(str(error))}); correct the URL, the endpoint "
            "or the credentials"
        ) from None


def require_obstore(extra: str) -> None:
    """Raises MissingExtraError: obstore is not installed."""
    try:
        import obstore  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("obstore", extra) from error


async def _until(works: Sequence[Coroutine[Any, Any, Answer]], deadline_s: float) -> list[Answer | Refusal]:
    """What each gives until the deadline; then the rest is cancelled, which drops its requests."""
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, timeout=deadline_s)
    finally:
        for task in tasks:
            task.cancel()
    ended: list[Answer | Refusal] = []
    for task in tasks:
        ended.append(task.result() if task.done() and not task.cancelled() else _late(deadline_s))
    return ended


def _late(deadline_s: float) -> Refusal:
    return Refusal(StoreTrouble.SILENT, f"no answer within {deadline_s:g} s")


async def _attempt(request: Callable[[], Awaitable[Answer]]) -> Answer | _Failure:
    """One request, once; whatever the store or the way to it refuses becomes a value."""
    from obstore.exceptions import BaseError

    try:
        return await request()
    except (BaseError, OSError) as error:
        return read_failure(error)
    except Exception as error:  # noqa: BLE001 - the credentials' provider, which the client calls, is others' code
        return _Failure(StoreTrouble.DENIED, f"{type(error).__name__}: {first_line(str(error))}", 0, again=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the client's own, which is no Exception
            raise
        return _Failure(StoreTrouble.REFUSED, f"the client failed: {first_line(str(error))}", 0, again=False)


def read_failure(error: Exception) -> _Failure:
    """What an error of the client says about the store.

    The client has no fields for it; its words begin the same way each time.
    """
    text = str(error)
    if _BEYOND.search(text):
        return _Failure(StoreTrouble.REFUSED, "416 InvalidRange", 416, again=False)
    status = _STATUS.search(text)
    if status is None:
        return _without_status(error, text)
    number = int(status[1])
    found = _CODE.search(text)
    code = (found[1] or found[2]) if found else status[2].strip()
    words = f"{number} {code}".rstrip()
    if code in _CLOCK:
        return _Failure(
            StoreTrouble.DENIED,
            f"{words}: the clock of this machine and the store's are too far apart; set it right (NTP)",
            number,
            again=False,
        )
    if number in (401, 403) or code in _CREDENTIAL_CODES:
        return _Failure(StoreTrouble.DENIED, words, number, again=False)
    if code in _NO_BUCKET:
        return _Failure(StoreTrouble.REFUSED, words, number, again=False)
    if number == 404:
        return _Failure(StoreTrouble.ABSENT, words, number, again=False)
    if number == 412 or code in _THERE:
        return _Failure(StoreTrouble.TAKEN, words, number, again=False)
    again = number in _AGAIN or (number == 400 and code in _PASSING_CODES)
    return _Failure(StoreTrouble.REFUSED, words, number, again=again, code="" if code == status[2].strip() else code)


def _without_status(error: Exception, text: str) -> _Failure:
    """The store did not answer, or not as it should."""
    kind = _KIND.search(text)
    if isinstance(error, ConnectionResetError) or (_EARLY.search(text) and _IN_BODY.search(text)):
        return _Failure(StoreTrouble.REFUSED, "the answer ended early", 0, again=True)
    if _EARLY.search(text):
        return _Failure(StoreTrouble.SILENT, "the connection was cut", 0, again=True)
    match kind[1] if kind else "":
        case "Timeout":
            return _Failure(StoreTrouble.SILENT, "no answer in time", 0, again=True)
        case "Connect":
            found = _UNTRUSTED.search(text)
            if found:
                why = f"its certificate is not trusted ({found[1]}): name who signs it in pools.object.ca"
                return _Failure(StoreTrouble.SILENT, why, 0, again=False)
            return _Failure(StoreTrouble.SILENT, "no connection", 0, again=True)
        case "Interrupted" | "Request" | "Unknown":
            return _Failure(StoreTrouble.SILENT, first_line(text), 0, again=True)
        case _:
            return _Failure(StoreTrouble.REFUSED, first_line(text), 0, again=False)


async def _next_page(pages: _Pages) -> Sequence[ObjectMeta] | _Failure:
    async def ask() -> Sequence[ObjectMeta]:
        try:
            return await anext(pages)
        except StopAsyncIteration:
            return ()

    return await _attempt(ask)


def _listed(meta: ObjectMeta) -> Listed:
    since_us = round(meta["last_modified"].timestamp() * 1e6)
    return Listed(meta["path"], meta["size"], since_us * 1000)


def _sent(body: Body | tuple[Body, ...]) -> memoryview | list[memoryview]:
    """As the client sends it, without a copy: parts leave one behind the other in one request."""
    return [_flat(part) for part in body] if isinstance(body, tuple) else _flat(body)


def _flat(body: Body) -> memoryview:
    """One dimension of bytes, as the client wants them."""
    return memoryview(body).cast("B")


def _delay_s(attempt: int) -> float:
    return random.uniform(0.0, min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempt - 1)))  # full jitter
