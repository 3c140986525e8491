"""Owners that lend HOST as a whole beside their sockets, as instances do over NIXL and over RDMA."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kvbm.core.ids import Namespace
from kvbm.transport.host_lending import HostLending
from kvbm.transport.lending import LentLimits
from tests.native_owner import NativeLender, NativeSite


class HostSite(NativeSite, ABC):
    """An owner that lends HOST in one way more than its sockets. What does not come that way comes over TCP.

    Args:
        falls_back: False: readers read in that way alone.
    """

    joins: HostLending

    def __init__(
        self, transport: str, lender: NativeLender, limits: LentLimits, folder: Path, falls_back: bool, **options: Any
    ) -> None:
        self._falls_back = falls_back
        self._admit, self._withdraw = lender.admit, lender.withdraw
        lender.admit, lender.withdraw = self._declare, self._revoke  # type: ignore[method-assign]
        super().__init__(transport, lender, limits, folder, connections=400, **options)

    @abstractmethod
    def _lend_host(self) -> HostLending:
        """HOST, to be lent beside the server that listens now."""

    @abstractmethod
    def _take_host_back(self) -> None:
        """Nobody reaches HOST any more. The server is closed."""

    def start(self) -> None:
        """Listen, where it listened before."""
        super().start()
        self.joins = self._lend_host()
        self.joins.start()

    def stop(self) -> None:
        self.joins.stop()
        super().stop()
        self._take_host_back()

    def _declare(self, namespace: Namespace, root: bytes = b"") -> None:
        """As a manager does, before blocks of a namespace are written."""
        self.joins.declare([namespace])
        self._admit(namespace, root)

    def _revoke(self, namespace: Namespace) -> None:
        self._withdraw(namespace)
        self.joins.revoke()
