"""The file EPOCH of a journal folder: which epoch has begun there, of which instance, with which durable pool.

It is JSON with its own checksum in it. A file that is damaged in any way is put aside and costs what it said and
nothing else: the next epoch is above all that segments, stream and catalog know, the pool's blocks are forgotten, and
the process's random run tells the new life from the old one.
"""

from __future__ import annotations

import os
from errno import EACCES, EAGAIN, EMFILE, ENFILE, ENOMEM, EPERM, ESTALE
from pathlib import Path

import msgspec

from kvbm.core.backend import Checksum
from kvbm.core.errors import JournalError
from kvbm.files import read_small
from kvbm.safe_log import SafeLog

log = SafeLog()

EPOCH_FILE = "EPOCH"
_MOST_ASIDE = 9
_MOST_EPOCH = 1 << 63
_MOST_BYTES = 16 << 20


class EpochRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says.

    Attributes:
        pool_id: name of the durable pool the epoch began with, "" for none.
        pool_since: the first epoch that began with this pool; what older epochs say of slots is about another one.
        runs: epochs that frames are here of, and which process began each.
        crc32c: of the same JSON with "" here.
    """

    instance: str
    epoch: int = 0
    pool_id: str = ""
    pool_since: int = 0
    runs: dict[int, str] = {}
    crc32c: str = ""

    def encoded(self, checksum: Checksum) -> bytes:
        """The file's bytes."""
        return msgspec.json.encode(msgspec.structs.replace(self, crc32c=_sum_of(self, checksum)))


_PASSING = {EACCES, EPERM, EMFILE, ENFILE, ENOMEM, EAGAIN, ESTALE}  # of the process or the mount; the file may be whole


def read_begun(folder: Path, instance: str, checksum: Checksum) -> EpochRecord:
    """What has begun in a folder; nothing where there is no file, or one that is damaged, which is then put aside.

    Raises: JournalError: it is another instance's; or it is damaged and cannot be put aside.
    """
    path = folder / EPOCH_FILE
    try:
        data = read_small(path, _MOST_BYTES)
        stored = msgspec.json.decode(data, type=EpochRecord)
    except FileNotFoundError:
        return EpochRecord(instance)
    except (OSError, ValueError) as error:  # msgspec's errors and those of UTF-8 are ValueErrors
        if isinstance(error, OSError) and error.errno in _PASSING:
            raise JournalError(f"{path} cannot be read now ({error.strerror}); see to it and start again") from None
        return _put_aside(path, instance, str(error))
    if stored.encoded(checksum) != data:
        return _put_aside(path, instance, "its checksum does not agree")
    if not (0 <= stored.epoch < _MOST_EPOCH and 0 <= stored.pool_since < _MOST_EPOCH):
        return _put_aside(path, instance, f"it says epoch {stored.epoch}")
    if stored.instance != instance:
        raise JournalError(
            f"journal folder {folder} belongs to instance {stored.instance!r}, not {instance!r}; "
            "give each instance its own folder"
        )
    return stored


def _sum_of(begun: EpochRecord, checksum: Checksum) -> str:
    return f"{checksum(msgspec.json.encode(msgspec.structs.replace(begun, crc32c=''))):08x}"


def _put_aside(path: Path, instance: str, why: str) -> EpochRecord:
    names = [path.with_name(f"{EPOCH_FILE}.damaged{f'.{n}' if n else ''}") for n in range(_MOST_ASIDE)]
    aside = next((name for name in names if not os.path.lexists(name)), names[-1])
    try:
        os.rename(path, aside)
    except OSError as error:
        raise JournalError(
            f"{path} is damaged ({why}) and cannot be put aside ({error.strerror}); move it out of the folder"
        ) from None
    log.warning(
        "journal.epoch_damaged",
        file=str(path),
        why=why,
        kept_as=str(aside),
        lost="which pool file its blocks lie in",
        remedy="the engine starts with what else is known and an empty NVME pool; see to the disk",
    )
    return EpochRecord(instance)
