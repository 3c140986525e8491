"""Heartbeats ↔ bytes: read within bounds, because whoever may send one may send anything."""

from __future__ import annotations

import msgspec

from kvbm.core.checks import is_longer, text_bytes
from kvbm.core.ids import MAX_FIELDS_BYTES, MAX_NAME_BYTES, MAX_TEXT_BYTES
from kvbm.streams.base import MOST_RUN, Heartbeat

_MOST_NUMBER = 1 << 63  # of what a catalog keeps in SQL
_MOST_TOLD = 1024  # namespaces, transfers and places that one heartbeat may tell of
_DECODER = msgspec.msgpack.Decoder(Heartbeat)


def encoded_heartbeat(heartbeat: Heartbeat) -> tuple[bytes, str]:
    """A heartbeat as it travels, read once as its readers will read it.

    Returns: its bytes, none where it does not even encode, and why no reader can read it; "" where they can.
    """
    data = b""
    try:
        data = msgspec.msgpack.encode(heartbeat)
        read = heartbeat_of(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        return data, str(error)
    if (read.cluster, read.instance) != (heartbeat.cluster, heartbeat.instance):
        return data, "its names do not read as they were written"
    return data, ""


def heartbeat_of(data: bytes) -> Heartbeat:
    """A heartbeat as its readers read it; of a trouble that is too long they keep the beginning.

    Raises: msgspec.MsgspecError, ValueError, RecursionError: it is none, or has more of something than a heartbeat may.
    """
    read = _DECODER.decode(data)
    # nearly all heartbeats are short and tell of nothing but a load, and a catalog reads thousands a second
    if 4 * max(len(read.instance), len(read.cluster)) > MAX_NAME_BYTES or 4 * len(read.run) > MOST_RUN:
        _check_names(read)
    if read.put_bytes or read.lends or read.transfers or read.told or read.ages or len(read.namespaces) > _MOST_TOLD:
        _check_told(read)
    if not (
        0 <= read.epoch < _MOST_NUMBER
        and 0 <= read.published < _MOST_NUMBER
        and 0 <= read.applied < _MOST_NUMBER
        and 0 <= read.wall_time_ns < _MOST_NUMBER
    ):
        _refuse_numbers(read)
    if read.trouble and is_longer(read.trouble, MAX_TEXT_BYTES):
        read = msgspec.structs.replace(read, trouble=f"{read.trouble[: MAX_TEXT_BYTES // 4]}…")
    return read


def _check_names(read: Heartbeat) -> None:
    _check_texts(
        [
            ("instance", read.instance, MAX_NAME_BYTES),
            ("cluster", read.cluster, MAX_NAME_BYTES),
            ("run", read.run, MOST_RUN),
        ]
    )


def _check_told(read: Heartbeat) -> None:
    counts = {
        "namespaces": len(read.namespaces),
        "put_bytes": len(read.put_bytes),
        "lends": len(read.lends),
        "transfers": len(read.transfers),
        "told": len(read.told),
        "ages": len(read.ages),
        "ages' counts": max((len(counts) for one in read.ages for counts in (one.wanted, one.evicted)), default=0),
    }
    for what, count in counts.items():
        if count > _MOST_TOLD:
            raise ValueError(f"{what} has {count} entries; at most {_MOST_TOLD} are read")
    texts = [("lends", text, MAX_TEXT_BYTES) for words in read.lends.items() for text in words]
    _check_texts(texts + [("transfers", one.transport, MAX_NAME_BYTES) for one in read.transfers])
    longest = max(map(len, read.told), default=0)
    if longest > MAX_FIELDS_BYTES:
        raise ValueError(f"a namespace of told has {longest} bytes; at most {MAX_FIELDS_BYTES} are read")


def _check_texts(texts: list[tuple[str, str, int]]) -> None:
    for what, text, most_bytes in texts:
        if is_longer(text, most_bytes):
            raise ValueError(f"a text of {what} has {text_bytes(text)} bytes; at most {most_bytes} are read")


def _refuse_numbers(read: Heartbeat) -> None:
    numbers = {
        "epoch": read.epoch,
        "published": read.published,
        "applied": read.applied,
        "wall_time_ns": read.wall_time_ns,
    }
    for what, number in numbers.items():
        if not 0 <= number < _MOST_NUMBER:
            raise ValueError(f"{what} is {number}; 0 to {_MOST_NUMBER - 1} are read")
