"""Settings that are each right and together are not. The configuration alone decides."""

from __future__ import annotations

from kvbm.doctor.finding import DoctorFinding, ok, problem, unused, warning
from kvbm.doctor.plan import MachinePlan

_GOOD_BEATS, _LEAST_BEATS = 3.0, 2.0


def judge_settings(plan: MachinePlan) -> list[DoctorFinding]:
    """Heartbeats against liveness, pools against what fills them."""
    return [_judge_pools(plan), _judge_liveness(plan)]


def _judge_liveness(plan: MachinePlan) -> DoctorFinding:
    nats, catalog = plan.settings.nats, plan.settings.catalog
    check = "liveness"
    if not nats.enabled:
        return unused(check, "nats.enabled is false")
    beats = catalog.liveness_s / nats.heartbeat_s
    found = (
        f"nats.heartbeat_s {nats.heartbeat_s:g}, catalog.liveness_s {catalog.liveness_s:g}: left out after "
        f"{beats:.1f} heartbeats"
    )
    fix = f"set catalog.liveness_s to {3.5 * nats.heartbeat_s:g}, on instances and catalog alike"
    if beats < _LEAST_BEATS:
        return problem(check, f"{found}; one that is late looks dead", fix)
    if beats < _GOOD_BEATS:
        return warning(check, f"{found}; two that are late look dead", fix)
    return ok(check, found)


def _judge_pools(plan: MachinePlan) -> DoctorFinding:
    check = "pools"
    pools, offload = plan.settings.pools, plan.settings.offload
    colder = [("HOST", plan.host, offload.host, "host"), ("NVME", plan.nvme, offload.nvme, "nvme")]
    named = [name for name, wanted, _, _ in colder if wanted] + (["OBJECT"] if pools.object.url else [])
    if not plan.hbm:
        if not named:
            return unused(check, "none configured, as for a catalog alone")
        if named == ["OBJECT"]:
            return unused(check, "OBJECT alone, as for a catalog and a janitor; an instance needs HBM, too")
        fix = "set pools.hbm.slots or pools.hbm.capacity_bytes"
        return problem(check, f"{', '.join(named)} without HBM; an instance does not start without it", fix)
    found = ", ".join(["HBM", *named])
    if plan.nvme and plan.settings.journal.in_memory:
        fix = "set journal.in_memory=false"
        return warning(
            check, f"{found}; without a journal that outlives the process NVME begins empty at each start", fix
        )
    idle = [(name, key) for name, wanted, policy, key in colder if wanted and policy == "never"]
    if pools.object.url and offload.object == "never" and not plan.settings.catalog.url:
        return warning(check, f"{found}; OBJECT is neither written nor found", "set catalog.url, or offload.object")
    if idle:
        name, key = idle[0]
        return warning(
            check, f"{found}; nothing is ever put into {name}", f"set offload.{key}=write_through, or drop the pool"
        )
    return ok(check, found)
