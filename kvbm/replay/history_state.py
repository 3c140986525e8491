"""Where a history stands in its log, as a file: what is needed to go on from there as if it had never stopped.

8 bytes   length of what follows as MessagePack, little-endian
…         `KeptState`, in which each array is its number
…         the arrays one after the other
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbm.core.errors import KvbmError
from kvbm.core.stays import STAY_ROW, TIER_STATE_ROW
from kvbm.files import write_new
from kvbm.replay.source import SourceError
from kvbm.replay.stays import SourceState

_DTYPES = {"stays": STAY_ROW, "tiers": TIER_STATE_ROW, "numbers": np.dtype("<u4")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Array(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    at: int
    rows: int


class KeptState(msgspec.Struct, frozen=True, kw_only=True):
    """What a file has.

    Attributes:
        went_back: stays that have ended before they began, by their instance's clock.
    """

    source: SourceState
    went_back: int


def write_state(path: Path, source: SourceState, went_back: int) -> None:
    """Raises OSError."""
    state = KeptState(source=source, went_back=went_back)
    arrays: list[np.ndarray] = []
    at = 0

    def placed(value: Any) -> Any:
        nonlocal at
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(type(value).__name__)
        array = _Array(_NAMES[value.dtype], at, len(value))
        arrays.append(np.ascontiguousarray(value))
        at += value.nbytes
        return array

    head = msgspec.msgpack.Encoder(enc_hook=placed).encode(state)
    write_new(path, b"")  # its owner's alone
    with path.open("ab") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for array in arrays:
            file.write(array.view(np.uint8).data)


def read_state(path: Path) -> KeptState:
    """Raises SourceError: it cannot be read."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        head, rest = data[8 : 8 + size].tobytes(), data[8 + size :]

        def taken(kind: type, value: Any) -> Any:
            if kind is not np.ndarray:
                raise NotImplementedError(kind)
            array = msgspec.convert(value, _Array)
            dtype = _DTYPES[array.kind]
            return rest[array.at : array.at + array.rows * dtype.itemsize].view(dtype)

        return msgspec.msgpack.Decoder(KeptState, dec_hook=taken).decode(head)
    except (OSError, ValueError, KeyError, msgspec.MsgspecError, KvbmError) as error:
        raise SourceError(f"{path} cannot be read ({error}); make the history anew") from None
