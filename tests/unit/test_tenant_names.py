"""Tenants that clients name are bounded: further ones are computed, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from kvbm.core.ids import Namespace
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.identity import EngineIdentity
from kvbm.engines.vllm.requests import Requests
from kvbm.engines.vllm.tenant_names import TenantNames

GROUP = Namespace(model="m", revision="r", block_tokens=16)


def request(tenant: str | None = None) -> Any:
    params = None if tenant is None else {"kvbm.tenant": tenant}
    return SimpleNamespace(
        request_id=str(tenant),
        kv_transfer_params=params,
        lora_request=None,
        num_prompt_tokens=16,
        mm_features=[],
        prompt_embeds=None,
        cache_salt=None,
    )


def test_tenants_that_settings_do_not_name_are_bounded_and_others_are_not() -> None:
    declared: list[Namespace] = []
    names = TenantNames(EngineIdentity([GROUP], {"secret": "s"}), [0], declared.extend, ["acme"], most_unnamed=2)
    with capture_logs() as logs:
        served = [bool(names.of(request(tenant))) for tenant in ("u1", "u2", "u3", "u4", "u1", "acme", "secret", None)]
    assert served == [True, True, False, False, True, True, True, True]
    assert [one.tenant for one in declared] == ["u1", "u2", "acme", "secret", ""]
    assert [log["event"] for log in logs] == ["tenant.too_many"]


def test_a_request_of_a_tenant_too_many_has_no_namespace_and_is_left_alone() -> None:
    names = TenantNames(EngineIdentity([GROUP], {}), [0], lambda _: None, [], most_unnamed=1)
    requests = Requests([], names.of, Adapters(1))
    assert requests.is_known(requests.state_of(request("u1")))
    assert not requests.is_known(requests.state_of(request("u2")))
