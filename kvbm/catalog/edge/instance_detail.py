"""What an instance's last heartbeat tells of it, for who looks at that instance alone."""

from __future__ import annotations

from kvbm.catalog.answers.prompts import ApiError
from kvbm.catalog.edge.overview import ages_told
from kvbm.catalog.put_bytes import put_by_instance
from kvbm.catalog.service import CatalogService
from kvbm.core.ages import AGE_BOUNDS_S
from kvbm.core.ids import InstanceId
from kvbm.core.lent import LENT_BY, REFUSED_FOR
from kvbm.core.overview import InstanceDetail, LentTold, NamespaceUsed, TransferTold

_MOST_NAMESPACES = 200
_MOST_TRANSFERS = 100


def instance_detail(service: CatalogService, instance: InstanceId) -> InstanceDetail:
    """See `InstanceDetail`. Raises ApiError: nothing was heard of it."""
    last = service.heartbeats.liveness.last(instance)
    if last is None:
        raise ApiError(
            404,
            "instance_unknown",
            f"no heartbeat of an instance {instance[:200]!r} was heard",
            "see /v1/instances for their names",
        )
    beat, known = last.heartbeat, service.sequencer.namespaces()
    used = sorted({*beat.namespaces, *beat.put_bytes})
    raw, stored = put_by_instance([(instance, beat)]).get(instance, (0, 0))
    namespaces = []
    for key in used[:_MOST_NAMESPACES]:
        fields, put = known.get(key), beat.put_bytes.get(key, (0, 0))
        namespaces.append(
            NamespaceUsed(
                id=key.hex(),
                model=fields.model if fields is not None else None,
                tenant=fields.tenant if fields is not None else None,
                put_raw=put[0],
                put_stored=put[1],
            )
        )
    lent = beat.lent
    return InstanceDetail(
        instance=instance,
        prefill_tokens_per_s=beat.prefill_tokens_per_s,
        queue_tokens_per_s=beat.queue_tokens_per_s,
        put_raw=raw,
        put_stored=stored,
        lends=beat.lends,
        lent=LentTold(
            bytes={way: getattr(lent, f"{way}_bytes") for way in LENT_BY},
            refused={why: getattr(lent, why) for why in REFUSED_FOR},
        )
        if lent is not None
        else None,
        transfers=[
            TransferTold(transport=one.transport, distance=one.distance, size=one.size, took_us=one.took_us)
            for one in beat.transfers[:_MOST_TRANSFERS]
        ],
        namespaces=namespaces,
        more_namespaces=max(0, len(used) - _MOST_NAMESPACES),
        bounds_s=list(AGE_BOUNDS_S),
        ages=ages_told(beat.ages),
    )
