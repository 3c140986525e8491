"""A store that was just opened, tried: bytes go there and come back."""

from __future__ import annotations

import secrets
import time

from kvbm.core.errors import PoolError
from kvbm.pools.stores.base import TRIAL_PREFIX, Get, Got, ObjectStore, Put, Refusal, StoreAwayError, StoreTrouble

_BYTES = 64
_LEAST_S = 1.0  # for a step, whatever the ones before it took


def try_out(store: ObjectStore, wait_s: float) -> tuple[str, ...]:
    """Put, read and delete a small object; gives what is worth saying once, in sentences.

    Who may not write there may still read, and the janitor alone has to delete, so both are remarks.

    Raises: PoolError: no bytes come back, or others. StoreAwayError: it does not answer in time, or is not well.
    """
    end_s = time.monotonic() + wait_s

    def left_s() -> float:
        return max(_LEAST_S, end_s - time.monotonic())

    name, body = f"{TRIAL_PREFIX}{secrets.token_hex(16)}", secrets.token_bytes(_BYTES)
    [unput] = store.put([Put(name, body)], left_s())
    _raise_away(store, "put", unput)
    [got] = store.get([Get(name, most_bytes=_BYTES)], left_s())
    if isinstance(got, Got):
        [kept] = store.delete([name], left_s())
        if bytes(got.body) != body:
            raise PoolError(
                f"OBJECT pool {store.name}: a small object came back with other bytes than were put; use another store"
            )
        words = (
            f"what is put under {TRIAL_PREFIX!r} to try the store stays there until a janitor comes: it cannot be "
            "deleted"
        )
        return (f"{words} ({kept.words})",) if kept is not None else ()
    _raise_away(store, "read", got)
    if unput is None and store.forgets and got.trouble is StoreTrouble.ABSENT:
        return ()
    if unput is not None and got.trouble is StoreTrouble.ABSENT:
        return (f"nothing can be put there ({unput.words}); what is there is read",)
    raise PoolError(
        f"OBJECT pool {store.name}: it opens, and a small object cannot be {'put' if unput is not None else 'read'}"
        f" ({(unput or got).words}); check the endpoint, the region, and what the credentials may do (put and get "
        "under the prefix)"
    )


def _raise_away(store: ObjectStore, step: str, refusal: Refusal | None) -> None:
    if refusal is not None and refusal.trouble is StoreTrouble.SILENT:
        why = (
            f"it opens, and a small object cannot be {step} ({refusal.words}); check the endpoint, the proxy and "
            "the "
            "network"
        )
        raise StoreAwayError(store.name, why, store.forgets)
