"""How far an erasure has come: what each who holds something answers, and the table of all of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvbm.core.checks import is_longer
from kvbm.core.errors import ErasureError
from kvbm.core.ids import MAX_TEXT_BYTES, NamespaceId
from kvbm.core.names import kind_of_name
from kvbm.erasure.record import Erasure
from kvbm.safe_log import SafeLog
from kvbm.terminal import as_json as json_of
from kvbm.terminal import plain

log = SafeLog()

INSTANCE, CATALOG, OBJECTS = "instance", "catalog", "objects"
_MOST_PLACES = 64  # of one answer; instances have a few
_SHOWN = 400  # characters of a cell, whose width is its column's
_NAMED = 3  # of those who say the same
_OF_CATALOG = "SQL, index, files"
_SECOND_NS = 1_000_000_000


class ErasedPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One place of one who answers.

    Attributes:
        name: of the place: a tier, the journal, SQL.
        erased: what was erased there, in words.
        waits: for whom or what the rest waits; "" when nothing is left.
    """

    name: str
    erased: str = ""
    waits: str = ""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far one has come with one erasure.

    Attributes:
        places: those that had, or may have, something.
        done_ns: when nothing was left anywhere; 0: not yet.
        namespaces: digests of namespaces that an instance says are the tenant's and that the record does not name. A
            hint to the operator, and no more: nothing is erased because an answer says so.
    """

    places: tuple[ErasedPlace, ...] = ()
    done_ns: int = 0
    namespaces: tuple[bytes, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one says of all erasures in force.

    Attributes:
        kind: INSTANCE, CATALOG or OBJECTS.
        gone: a catalog that has stopped and left nothing behind, or that an operator has forgotten: nobody waits for it
            until it answers.
    """

    name: str
    kind: str
    at_ns: int
    progress: dict[int, Progress]
    gone: bool = False


class Line(NamedTuple):
    """One line of the table. `waits` is empty where all is gone."""

    who: str
    place: str
    erased: str
    waits: str


def encoded(answer: Answer) -> bytes:
    """An answer as it goes on the stream."""
    return msgspec.msgpack.encode(answer)


def decoded(data: bytes) -> Answer:
    """An answer from the stream. Raises ErasureError: it is none."""
    try:
        answer = msgspec.msgpack.decode(data, type=Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ErasureError(f"an answer to an erasure cannot be read ({error})") from None
    for progress in answer.progress.values():
        if len(progress.places) > _MOST_PLACES or any(
            is_longer(text, MAX_TEXT_BYTES)
            for place in progress.places
            for text in (place.name, place.erased, place.waits)
        ):
            raise ErasureError(
                f"an answer to an erasure has more than {_MOST_PLACES} places, or a text of more than {MAX_TEXT_BYTES} "
                "bytes"
            )
    return answer


def answers_of(found: Mapping[str, bytes]) -> list[Answer]:
    """What everybody says for himself, by name.

    What cannot be read, or is said in another's name, is no answer: it is waited for.

    What one is stands in the name, which the server's permissions bind to who has it: an instance speaks for no catalog
    and no pool.
    """
    answers = []
    for name, data in found.items():
        try:
            answer = decoded(data)
        except ErasureError as error:
            log.debug("erasure.answer_unread", name=name, why=str(error))
            continue
        kind = kind_of_name(name)
        if answer.name == name and answer.kind == (INSTANCE if kind is None else kind):
            answers.append(answer)
    return answers


def counted(answers: Iterable[Answer], instances: Collection[str]) -> list[Answer]:
    """Answers of those who can have something: an instance that SQL knows speaks for itself alone, and nobody else for
    one.
    """
    return [answer for answer in answers if (answer.kind == INSTANCE) == (answer.name in instances)]


def hints(
    answers: Iterable[Answer], erasure: Erasure, namespaces: Iterable[NamespaceId]
) -> dict[NamespaceId, list[str]]:
    """Of each namespace, the instances that say it is the erased tenant's."""
    said = {
        answer.name: frozenset(answer.progress[erasure.number].namespaces)
        for answer in answers
        if answer.kind == INSTANCE and erasure.number in answer.progress
    }
    digests = {one: erasure.namespace_digest(one) for one in namespaces}
    return {one: sorted(name for name, own in said.items() if digest in own) for one, digest in digests.items()}


def unfinished(answers: Sequence[Answer], number: int, kind: str, expected: Collection[str] = ()) -> dict[str, str]:
    """Who of a kind is not done with an erasure, and what each waits for.

    Args:
        expected: names that must answer, whether they have or not.
    """
    left = dict.fromkeys(expected, "has not answered")
    for answer in answers:
        if answer.kind != kind or (expected and answer.name not in left):
            continue
        progress = answer.progress.get(number)
        if progress is None:
            if kind != OBJECTS:  # a pool that nobody has had erased may have nothing of it
                left[answer.name] = "has not answered"
        elif progress.done_ns:
            left.pop(answer.name, None)
        else:
            waits = "; ".join(f"{place.name}: {place.waits}" for place in progress.places if place.waits)
            left[answer.name] = waits or "goes on"
    return left


class Known(NamedTuple):
    """What the table is made of, beside the answers.

    Attributes:
        instances: that must answer, each with what is to be said while it does not.
        first_ns: when the oldest event that the stream still has was stored; None: it has none.
        max_age_s: how long the stream keeps events; 0: for ever.
        has_objects: whether an object pool is configured here.
        now_ns: the time.
        untold: namespaces of claims whose fields nobody has told, so that they may be the tenant's, each with those who
            say that it is.
    """

    instances: Mapping[str, str]
    first_ns: int | None
    max_age_s: float
    has_objects: bool
    now_ns: int
    untold: Mapping[NamespaceId, Sequence[str]] = {}


def table(number: int, answers: Sequence[Answer], known: Known) -> list[Line]:
    """Each place, what was erased there, and what it waits for."""
    lines: list[Line] = []
    by_name = {answer.name: answer for answer in answers if number in answer.progress}
    done_ns: list[int] = []
    for name, silent in sorted(known.instances.items()):
        answer = by_name.get(name)
        if answer is None:
            lines.append(Line(name, "all", "", silent))
        else:
            lines += _lines_of(answer, number)
            done_ns.append(answer.progress[number].done_ns)
    others = [answer for answer in by_name.values() if answer.name not in known.instances]
    for answer in sorted(others, key=lambda one: (one.kind, one.name)):
        if answer.kind == OBJECTS:  # an instance that SQL does not know any more was forgotten
            lines += _lines_of(answer, number)
            done_ns.append(answer.progress[number].done_ns)
    if known.has_objects and not any(answer.kind == OBJECTS for answer in others):
        lines.append(Line("object pool", "objects", "", "kvbm-catalog erase with the pool's settings"))
        done_ns.append(0)
    lines += _catalog_lines(number, answers)
    lines += [_untold_line(one, known.untold[one]) for one in sorted(known.untold)]
    lines.append(_stream_line(done_ns, known))
    return lines


def _lines_of(answer: Answer, number: int) -> list[Line]:
    progress = answer.progress[number]
    lines = [Line(answer.name, place.name, place.erased, place.waits) for place in progress.places]
    return lines or [Line(answer.name, "all", "nothing was there", "" if progress.done_ns else "its first step")]


def _catalog_lines(number: int, answers: Sequence[Answer]) -> list[Line]:
    """Every catalog that has ever answered has something until it says that it has erased it, or is gone."""
    lines: list[Line] = []
    for answer in sorted(answers, key=lambda one: one.name):
        if answer.kind != CATALOG or (answer.gone and not _is_done(answer, number)):
            continue
        if number in answer.progress:
            lines += _lines_of(answer, number)
        else:
            word = (
                "the catalog to answer: it erases when it runs again; if it never will: kvbm-catalog erase "
                f"--forget-catalog {answer.name}"
            )
            lines.append(Line(answer.name, _OF_CATALOG, "", word))
    return lines or [Line("catalog", _OF_CATALOG, "", "a catalog that serves")]


def _is_done(answer: Answer, number: int) -> bool:
    return number in answer.progress and answer.progress[number].done_ns > 0


def _untold_line(namespace: NamespaceId, said_by: Sequence[str]) -> Line:
    """Nobody but the operator can say whose a namespace is that has no fields."""
    who = f"instance {', '.join(said_by[:_NAMED])} says it is the tenant's, and" if said_by else "it is claimed, and"
    name = namespace.hex()
    word = (
        f"your word: {who} nobody has told its fields; erase it (--namespace {name}), or say that it is another's "
        f"(--spare {name})"
    )
    return Line("SQL", f"claims of {name}", "", word)


def _stream_line(done_ns: Sequence[int], known: Known) -> Line:
    """Events that name what was erased are on the stream until they are too old for it."""
    where = "events on the stream"
    if not known.max_age_s:
        return Line("NATS", where, "", "an operator: the stream KVBM keeps events for ever; set its max_age")
    if not all(done_ns):
        return Line("NATS", where, "", f"all above, and {_span(known.max_age_s)} after that")
    last_ns = max(done_ns, default=0)
    if known.first_ns is None or known.first_ns > last_ns:
        return Line("NATS", where, "all went by age", "")
    until_ns = last_ns + int(known.max_age_s * _SECOND_NS)
    return Line("NATS", where, "", f"age: the last goes by {at_words(until_ns)}")


def _span(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


def at_words(at_ns: int) -> str:
    """A time for people, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(-(-at_ns // _SECOND_NS)))


def is_gone(lines: Sequence[Line]) -> bool:
    """Whether nothing waits."""
    return not any(line.waits for line in lines)


def as_words(number: int, lines: Sequence[Line]) -> str:
    """The table for people, a line each. Who answers has chosen the words: each is `plain`."""
    rows = [
        ("who", "place", "erased", "waits for"),
        *(tuple(map(_cell, (*line[:3], line.waits or "nothing: it is gone"))) for line in lines),
    ]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    body = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    ]
    waiting = sum(bool(line.waits) for line in lines)
    last = (
        f"erasure {number}: all is gone"
        if not waiting
        else (
            f"erasure {number}: {waiting} of {len(lines)} places wait; ask again: kvbm-catalog erase --status {number}"
        )
    )
    return "\n".join([*body, last])


def _cell(words: str) -> str:
    shown = plain(words[: _SHOWN + 1])
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"


def as_json(number: int, lines: Sequence[Line]) -> str:
    """The same as one line of JSON."""
    return json_of({"number": number, "gone": is_gone(lines), "places": [line._asdict() for line in lines]})
