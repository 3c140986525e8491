"""Waiting until a catalog is ready: what each look at it has shown, whoever sleeps between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbm.core.answers import ReadyAnswer
from kvbm.core.errors import CatalogClosedError, CatalogError

POLL_S = 0.05


class Readiness:
    """Whether a catalog is ready, by the last look at it, and why it is not."""

    def __init__(self) -> None:
        self.is_ready = False
        self._why = "it has not answered"

    @contextmanager
    def look(self) -> Iterator[None]:
        """One look, in which a catalog that does not answer is not ready.

        Raises CatalogClosedError: nobody can ask any more.
        """
        try:
            yield
        except CatalogClosedError:
            raise
        except CatalogError as error:
            self._why = str(error)

    def note(self, answer: ReadyAnswer) -> None:
        """Take what the catalog has answered."""
        self.is_ready, self._why = answer.ready, answer.reason

    def late(self, url: str, timeout_s: float) -> CatalogError:
        """That a catalog is not ready in time, and why."""
        return CatalogError(f"the catalog at {url} is not ready after {timeout_s:g} s: {self._why}")
