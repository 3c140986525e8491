"""The namespaces of requests, each declared before its first use.

Clients choose tenants' names, so those that settings do not name are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvbm.core.ids import Namespace
from kvbm.engines.vllm.identity import EngineIdentity
from kvbm.engines.vllm.requests import GroupNamespace
from kvbm.safe_log import SafeLog

log = SafeLog()

_MOST_KNOWN = 4096  # tenants and adapters kept at hand
# Tenants, with each adapter of theirs, that settings do not name: about 2 KB each for as long as the process lives
MOST_UNNAMED = 65_536


class TenantNames:
    """See the module. Owner thread only.

    Args:
        group_ids: of the engine's groups, in their order: vLLM's number of each.
        declare: tells the manager of namespaces.
        tenants: those that settings name; as theirs count those that have a secret.
        most_unnamed: other tenants, with each adapter of theirs, that are served; requests of more are computed, and
            nothing of them is stored, loaded or looked up.
    """

    def __init__(
        self,
        identity: EngineIdentity,
        group_ids: Sequence[int],
        declare: Callable[[Sequence[Namespace]], object],
        tenants: Collection[str],
        most_unnamed: int = MOST_UNNAMED,
    ) -> None:
        self._identity, self._group_ids, self._declare = identity, group_ids, declare
        self._tenants, self._most_unnamed = {"", *tenants}, most_unnamed
        self._known: dict[tuple[str, str, str], list[GroupNamespace]] = {}
        self._unnamed: set[tuple[str, str]] = set()
        self._has_warned = False

    def of(self, request: Any, weights: str = "") -> list[GroupNamespace]:
        """The namespaces of a request by group; none where its tenant is one too many.

        Args:
            weights: the digest of its adapter's, if it has one.
        """
        tenant, lora = self._identity.tenant_of(request), self._identity.lora_of(request, weights)
        whose = tenant, lora, self._identity.secret_of(tenant)
        found = self._known.get(whose)
        if found is None:
            if not self._may(*whose):
                return []
            names = self._identity.namespaces(tenant, lora)
            self._declare(names)
            found = [GroupNamespace(names[at].id, self._identity.root(names[at])) for at in self._group_ids]
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[whose] = found
        return found

    def _may(self, tenant: str, lora: str, secret: str) -> bool:
        if tenant in self._tenants or secret or (tenant, lora) in self._unnamed:
            return True
        if len(self._unnamed) < self._most_unnamed:
            self._unnamed.add((tenant, lora))
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "tenant.too_many",
                unnamed=len(self._unnamed),
                notice="requests have named more tenants than an engine serves beside those of settings; nothing of "
                "further ones is kept"
                " until it restarts: name those that count in [tenants], and let the gateway, not clients, choose "
                "kvbm.tenant",
            )
        return False
