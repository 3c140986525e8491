"""What makes each alert of deploy/prometheus fire, what ends it, and the nearest thing that must not: as series for
`promtool test rules`.

Times are minutes. Series have a value a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

END = 60  # of each case
Runs = list[tuple[float | str, int]]  # values, each for so many minutes; the last one to the end
CATALOG = 'job="kvbm-catalog",instance="c:7700"'
ENGINE = 'job="kvbm-engines",instance="e:9400",exported_instance="e"'


class AlertCase(NamedTuple):
    """One alert.

    Attributes:
        wrong: series by selector, under which it fires. pending, firing, ended: minutes at which it waits, fires, and
            is over; at minute `before` it is neither.
        harmless: sets of series under which it does not fire.
    """

    wrong: Mapping[str, Runs]
    pending: int
    firing: int
    ended: int
    harmless: list[Mapping[str, Runs]]
    before: int = 1


def of_catalog(name: str, more: str = "") -> str:
    return f"kvbm_catalog_{name}{{{CATALOG}{more}}}"


def of_engine(name: str, more: str = "") -> str:
    return f"kvbm_{name}{{{ENGINE}{more}}}"


def flag(series: str, wait: int, back: float = 0, on: float = 1, also: Mapping[str, Runs] | None = None) -> AlertCase:
    """One value that is wrong from minute 3 to 33; shorter than the alert waits, it is harmless."""
    kept = dict(also or {})
    return AlertCase(
        {series: [(back, 3), (on, 30), (back, END)]} | kept,
        pending=3 + max(0, wait - 1),
        firing=3 + wait,
        ended=33,
        harmless=[{series: [(back, 3), (on, wait), (back, END)]} | kept, {series: [(back, END)]} | kept],
    )


def grows(series: str) -> AlertCase:
    """A counter that grows once, at minute 3; one that stands high, or starts again from 0, is harmless."""
    return AlertCase(
        {series: [(2, 3), (3, END)]},
        pending=3,
        firing=4,
        ended=14,
        harmless=[{series: [(7, END)]}, {series: [(7, 20), (0, END)]}, {series: [("_", 20), (7, END)]}],
    )


def rises(series: str, wrong: float, harmless: float, pending: int, ended: int) -> AlertCase:
    """A counter that goes up by so much each minute, from minute 3 to 33."""
    return AlertCase(
        {series: _up(wrong)}, pending=pending, firing=pending + 1, ended=ended, harmless=[{series: _up(harmless)}]
    )


def _up(by: float) -> Runs:
    return [(0, 3), *((round(by * minute, 3), 1) for minute in range(1, 31)), (30 * by, END)]


def ratio(series: str, other: str, of: float, wrong: float, right: float, wait: int) -> AlertCase:
    """Two values of which one is wrong beside the other."""
    both: Any = lambda value: {series: [(right, 3), (value, 30), (right, END)], other: [(of, END)]}  # noqa: E731
    return AlertCase(
        both(wrong), pending=3 + wait - 1, firing=3 + wait, ended=33, harmless=[both(right), {other: [(of, END)]}]
    )


_READS = 'kvbm_catalog_transfer_bytes_per_second_bucket{job="kvbm-catalog",instance="c:7700",transport="tcp"'


def _speeds(slow: float, quick: float, distance: int = 1) -> Mapping[str, Runs]:
    """Reads that go on from minute 3 to 33, so many a minute a little below 100 MB/s and a little above."""
    counts = {"9e7": 0.0, "1e8": slow, "1.1e8": slow + quick, "+Inf": slow + quick}
    return {f'{_READS},distance="{distance}",le="{bound}"}}': _up(count) for bound, count in counts.items()}


_5XX = of_catalog("answers_total", ',status="503"')
_A_TENTH = (6.6, 5.4)  # a minute: a little above 0.1 a second, and a little below
_UP = 'up{job="kvbm-catalog",instance="c:7700"}'
_OTHER_UP = 'up{job="node",instance="c:9100"}'
_STOPPED = of_catalog("instances", ',state="stopped"')
_SUSPECT = of_catalog("suspect")
_RULE = ',rule="created-twice"'
_FULL = ',rule="refused-at-capacity"'
_FAILED, _CORRUPT = of_engine("manager_failed_copies_total"), of_engine("manager_corrupt_blocks_total")
_VLLM = '{job="kvbm-engines",instance="e:8000",engine="0",model_name="m"}'

ALERT_CASES: dict[str, AlertCase] = {
    "KvbmNoCatalog": AlertCase(
        {of_catalog("ready"): [(1, 3), ("_", 30), (1, END)]},
        pending=12,  # a series is there for 5 minutes after its last value
        firing=13,
        ended=33,
        harmless=[{of_catalog("ready"): [(1, 3), (0, END)]}, {of_catalog("ready"): [(1, 3), ("_", 4), (1, END)]}],
    ),
    "KvbmTargetDown": AlertCase(
        {_UP: [(1, 3), (0, 30), (1, END)], of_catalog("ready"): [(1, 3), ("_", 30), (1, END)]},
        pending=4,
        firing=5,
        ended=33,
        harmless=[
            {_OTHER_UP: [(0, END)], _UP: [(1, END)], of_catalog("ready"): [(1, END)]},  # another's
            {_UP: [(1, 3), (0, 2), (1, END)], of_catalog("ready"): [(1, 3), ("_", 2), (1, END)]},
        ],
    ),
    "KvbmCatalogNotReady": flag(of_catalog("ready"), 1, back=1, on=0),
    "KvbmCatalogDegraded": flag(of_catalog("degraded"), 1),
    "KvbmNatsAway": flag(
        of_catalog("degraded_parts", ',part="NATS"'), 1, also={of_catalog("degraded_parts", ',part="SQL"'): [(1, END)]}
    ),
    "KvbmSqlAway": flag(
        of_catalog("degraded_parts", ',part="SQL"'), 5, also={of_catalog("degraded_parts", ',part="NATS"'): [(1, END)]}
    ),
    "KvbmFolderRefuses": flag(
        of_catalog("degraded_parts", ',part="archive"'),
        5,
        also={of_catalog("degraded_parts", ',part="SQL"'): [(1, END)]},
    ),
    "KvbmTaskEnded": flag(
        of_catalog("degraded_parts", ',part="tasks"'),
        1,
        also={of_catalog("degraded_parts", ',part="history"'): [(1, END)]},
    ),
    "KvbmViewOld": flag(of_catalog("view_age_seconds"), 1, back=29, on=31),
    "KvbmCatalogLags": flag(of_catalog("lag_seconds"), 5, back=29, on=31),
    "KvbmSqlBehind": ratio(of_catalog("stream_sequence"), of_catalog("stored_sequence"), 5000, 15_001, 15_000, 15),
    "KvbmIndexNearCapacity": ratio(of_catalog("index_entries"), of_catalog("index_capacity"), 1000, 901, 900, 10),
    "KvbmCatalogErrors": rises(_5XX, *_A_TENTH, 11, 33)._replace(
        harmless=[
            rises(_5XX, *_A_TENTH, 1, 1).harmless[0],
            {of_catalog("answers_total", ',status="429"'): _up(600)},
        ]
    ),
    "KvbmVersionsMixed": AlertCase(
        {
            of_catalog("build_info", ',version="1",python="3.11"'): [(1, 6 * END)],
            of_engine("manager_build_info", ',version="2",python="3.11"'): [("_", 3), (1, 180), ("_", END)],
        },
        pending=122,
        firing=123,
        ended=183 + 5,
        harmless=[
            {
                of_catalog("build_info", ',version="1",python="3.11"'): [(1, END)],
                of_engine("manager_build_info", ',version="1",python="3.12"'): [(1, END)],
            }
        ],
    ),
    "KvbmInstancesExcluded": ratio(of_catalog("excluded"), _STOPPED, 2, 3, 2, 10),
    "KvbmTwoRuns": flag(of_catalog("ignored"), 1),
    "KvbmGapsNotRepaired": AlertCase(
        {
            of_catalog("gaps_total"): [(4, 3), (5, END)],
            of_catalog("gaps_repaired_total"): [(4, 33), (5, END)],
            _SUSPECT: [(0, 3), (1, 30), (0, END)],
        },
        pending=12,
        firing=13,
        ended=33,
        harmless=[
            {  # it is made up for in time
                of_catalog("gaps_total"): [(4, 3), (5, END)],
                of_catalog("gaps_repaired_total"): [(4, 12), (5, END)],
                _SUSPECT: [(0, 3), (1, 9), (0, END)],
            },
            {  # what is suspect has lost no events
                of_catalog("gaps_total"): [(4, END)],
                of_catalog("gaps_repaired_total"): [(4, END)],
                _SUSPECT: [(1, END)],
            },
            {  # whoever lost them is forgotten
                of_catalog("gaps_total"): [(4, 3), (5, END)],
                of_catalog("gaps_repaired_total"): [(4, END)],
                _SUSPECT: [(0, END)],
            },
        ],
    ),
    "KvbmDigestDivergence": grows(of_catalog("digest_divergence_total")),
    "KvbmAnomalies": grows(of_catalog("anomalies_total", _RULE))._replace(
        harmless=[
            *grows(of_catalog("anomalies_total", _RULE)).harmless,
            grows(of_catalog("anomalies_total", _FULL)).wrong,
        ]
    ),
    "KvbmIndexRefuses": grows(of_catalog("anomalies_total", _FULL))._replace(
        harmless=[
            *grows(of_catalog("anomalies_total", _FULL)).harmless,
            grows(of_catalog("anomalies_total", _RULE)).wrong,
        ]
    ),
    "KvbmNewerFrames": grows(of_catalog("newer_total")),
    "KvbmRoutesRefused": grows(of_catalog("routes_refused_total")),
    "KvbmStrangeMessages": grows(of_catalog("poison_total")),
    "KvbmRowsRefused": grows(of_catalog("rows_refused_total")),
    "KvbmNamespacesRefused": grows(of_catalog("namespaces_refused_total")),
    "KvbmInstanceTrouble": flag(of_catalog("troubled", ',exported_instance="e"'), 2),
    "KvbmManagerTrouble": flag(
        of_engine("manager_trouble", ',part="tiers"'),
        2,
        also={of_engine("manager_trouble", ',part="journal"'): [(1, END)]},
    ),
    "KvbmJournalRefuses": flag(
        of_engine("manager_trouble", ',part="journal"'),
        1,
        also={of_engine("manager_trouble", ',part="tiers"'): [(1, END)]},
    ),
    "KvbmEventsNotPublished": ratio(
        of_engine("manager_applied_offset"), of_engine("manager_published_offset"), 1, 100_002, 100_001, 5
    )._replace(
        harmless=[  # without a stream
            {
                of_engine("manager_applied_offset"): [(900_000, END)],
                of_engine("manager_published_offset"): [("NaN", END)],
            }
        ]
    ),
    "KvbmFailedCopies": grows(_FAILED),
    "KvbmCorruptBlocks": grows(_CORRUPT),
    "KvbmSlotsQuarantined": flag(of_engine("manager_quarantined_slots"), 10),
    "KvbmBlocksLate": rises(of_engine("manager_late_acquires_total"), *_A_TENTH, 21, 33),
    "KvbmPeersFail": rises(of_catalog("transfer_failures_total", ',transport="tcp",distance="1"'), *_A_TENTH, 11, 33),
    "KvbmPeersSlow": AlertCase(
        _speeds(60, 40),
        pending=12,
        firing=13,
        ended=37,
        harmless=[_speeds(40, 60), _speeds(60, 40, distance=3), _speeds(0, 0)],
    ),
}

# Other series of which an alert speaks, each with what makes it fire like the one above.
ALSO: dict[str, list[Mapping[str, Runs]]] = {
    "KvbmFolderRefuses": [{of_catalog("degraded_parts", ',part="checkpoints"'): [(0, 3), (1, 30), (0, END)]}],
    "KvbmStrangeMessages": [grows(of_catalog("foreign_total")).wrong],
    "KvbmFailedCopies": [grows(f"kvbm_vllm_failed_loads_total{_VLLM}").wrong],
    "KvbmCorruptBlocks": [
        grows(f"kvbm_vllm_corrupt_blocks_total{_VLLM}").wrong,
        grows(of_catalog("lent_corrupt_blocks_total", ',exported_instance="e"')).wrong,
    ],
    "KvbmBlocksLate": [rises(f"kvbm_vllm_late_acquires_total{_VLLM}", *_A_TENTH, 1, 1).wrong],
    "KvbmTargetDown": [
        {
            f'up{{job="kvbm-engines",instance="{instance}"}}': [(1, 3), (0, 30), (1, END)],
            series: [(1, 3), ("_", 30), (1, END)],
        }
        for instance, series in (
            ("e:9400", of_engine("manager_epoch")),
            ("e:8000", f"kvbm_vllm_loaded_blocks_total{_VLLM}"),
        )
    ],
    "KvbmVersionsMixed": [
        {
            of_catalog("build_info", ',version="1",python="3.11"'): [(1, 6 * END)],
            of_catalog("build_info", ',version="2",python="3.11",pod="2"'): [("_", 3), (1, 180), ("_", END)],
        }
    ],
}


def promtool_tests(name: str, case: AlertCase, also: list[Mapping[str, Runs]]) -> list[dict[str, Any]]:
    """The groups of a file for `promtool test rules`."""
    states = {case.before: None, case.pending: "pending", case.firing: "firing", case.ended: None}
    wrong = [_group(f"{name}, wrong", series, _states(name, states)) for series in (case.wrong, *also)]
    never = f'max_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[{END}m])'
    return wrong + [
        _group(f"{name}, harmless", series, [{"expr": never, "eval_time": f"{END}m", "exp_samples": []}])
        for series in case.harmless
    ]


def _states(name: str, states: Mapping[int, str | None]) -> list[dict[str, Any]]:
    """At these minutes it is in these states alone; None: in neither."""
    return [
        {
            "expr": f'count by (alertstate) (ALERTS{{alertname="{name}"}})',
            "eval_time": f"{minute}m",
            "exp_samples": [] if state is None else [{"labels": f'{{alertstate="{state}"}}', "value": 1}],
        }
        for minute, state in states.items()
    ]


def _group(name: str, series: Mapping[str, Runs], checks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": _values(runs)} for one, runs in series.items()],
        "promql_expr_test": checks,
    }


def _values(runs: Runs) -> str:
    return " ".join(
        f"_x{minutes}"
        if value == "_"
        else f"{value}+0x{minutes - 1}"
        if value != "NaN"
        else " ".join(["NaN"] * minutes)
        for value, minutes in runs
    )
