"""The dashboard of a cluster: what its catalogs know, in the order in which an operator asks."""

from __future__ import annotations

from tools.dashboards.panels import BAD, GOOD, SOSO, Panel, Row, quantile, rate, stat

_C = 'job=~"$job",instance=~"$instance"'


def _latency(title: str, metric: str) -> Panel:
    series = f"kvbm_catalog_{metric}_seconds_bucket{{{_C}}}"
    return Panel(
        title,
        "The index takes microseconds; milliseconds mean that the process is short of CPU.",
        "s",
        tuple((quantile(of, series, "le, instance"), f"{{{{instance}}}} p{round(100 * of)}") for of in (0.5, 0.99)),
    )


CLUSTER = (
    Row(
        "Is it well?",
        (
            stat(
                "Catalogs ready",
                "Of those that are scraped. One that is not ready answers 503; /readyz says why.",
                "percentunit",
                f"avg(kvbm_catalog_ready{{{_C}}})",
                (None, BAD),
                (1, GOOD),
            ),
            stat(
                "Parts that do not work",
                "NATS, SQL, archive, checkpoints, instances or tasks; /readyz names them.",
                "short",
                f"sum(kvbm_catalog_degraded_parts{{{_C}}})",
            ),
            stat(
                "Age of the view",
                "0 while all is read; else how old answers are.",
                "s",
                f"max(kvbm_catalog_view_age_seconds{{{_C}}})",
                (None, GOOD),
                (10, SOSO),
                (30, BAD),
            ),
            stat(
                "Instances with trouble",
                "A part of them does not work; trouble in /v1/instances says which.",
                "short",
                f"count(max by (exported_instance) (kvbm_catalog_troubled{{{_C}}}) == 1) or vector(0)",
            ),
            stat(
                "Excluded, not stopped",
                "Instances left out of answers that nobody has stopped: silent, restarted, or of a newer kvbm.",
                "short",
                f'max(kvbm_catalog_excluded{{{_C}}} - ignoring (state) kvbm_catalog_instances{{state="stopped",{_C}}})',
            ),
            stat(
                "Alerts firing",
                "Of the rules in deploy/prometheus.",
                "short",
                'count(ALERTS{alertname=~"Kvbm.+",alertstate="firing"}) or vector(0)',
            ),
            Panel(
                "Alerts",
                "Which rules wait or fire.",
                "short",
                (('count by (alertname, alertstate) (ALERTS{alertname=~"Kvbm.+"})', "{{alertname}} {{alertstate}}"),),
                width=12,
            ),
            Panel(
                "Parts that do not work",
                "1 while a part does not take what it should.",
                "short",
                ((f"kvbm_catalog_degraded_parts{{{_C}}}", "{{instance}} {{part}}"),),
                "state-timeline",
                12,
                ((None, GOOD), (1, BAD)),
            ),
        ),
    ),
    Row(
        "Who is there?",
        (
            Panel(
                "Instances by state",
                "As many live as run; silent are those that ended without a word.",
                "short",
                ((f"max by (state) (kvbm_catalog_instances{{{_C}}})", "{{state}}"),),
            ),
            Panel(
                "Left out, shut out, suspect, behind",
                "All near 0. Suspect ones may have missed events; behind are those that decided what is not read yet.",
                "short",
                tuple(
                    (f"max(kvbm_catalog_{name}{{{_C}}})", name) for name in ("excluded", "ignored", "suspect", "behind")
                ),
            ),
            Panel(
                "What runs",
                "One version everywhere but during an upgrade.",
                "short",
                ((f"count by (version, python) (kvbm_catalog_build_info{{{_C}}})", "kvbm {{version}}, {{python}}"),),
            ),
        ),
    ),
    Row(
        "Are answers quick, and what do they say?",
        (
            _latency("Time to answer a route", "route"),
            _latency("Time to answer a lookup", "lookup"),
            Panel(
                "Answers by status",
                "200, and few of the others.",
                "reqps",
                ((rate(f"kvbm_catalog_answers_total{{{_C}}}", "status"), "{{status}}"),),
            ),
            Panel(
                "Questions that found nothing",
                "not_held as prompts are new; namespace_unknown and hashes_short near 0.",
                "ops",
                ((rate(f"kvbm_catalog_prompts_missed_total{{{_C}}}", "why"), "{{why}}"),),
            ),
            Panel(
                "Refusals",
                "Near 0; unknown_caller is a token that has run out, or a stranger; the others are limits.",
                "ops",
                ((rate(f"kvbm_catalog_refusals_total{{{_C}}}", "why"), "{{why}}"),),
            ),
            Panel(
                "Requests by caller",
                "Who asks how much, and what is let through.",
                "reqps",
                ((rate(f"kvbm_catalog_requests_total{{{_C}}}", "caller, outcome"), "{{caller}} {{outcome}}"),),
            ),
        ),
    ),
    Row(
        "Does it keep up?",
        (
            Panel(
                "Events applied",
                "As busy as the engines are.",
                "ops",
                ((rate(f"kvbm_catalog_events_total{{{_C}}}", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Lag behind the stream",
                "0 but for moments.",
                "s",
                ((f"kvbm_catalog_lag_seconds{{{_C}}}", "{{instance}}"),),
            ),
            Panel(
                "Messages not read, and not in SQL",
                "Small, and going down after NATS or a database was away.",
                "short",
                (
                    (f"kvbm_catalog_lag_messages{{{_C}}}", "{{instance}} not read"),
                    (
                        f"kvbm_catalog_stream_sequence{{{_C}}} - kvbm_catalog_stored_sequence{{{_C}}}",
                        "{{instance}} not in SQL",
                    ),
                ),
            ),
            Panel(
                "Events lost and not made up for",
                "0; each gap asks for a snapshot.",
                "short",
                (
                    (
                        f"kvbm_catalog_gaps_total{{{_C}}} - kvbm_catalog_gaps_repaired_total{{{_C}}}",
                        "{{instance}} gaps",
                    ),
                ),
            ),
            Panel(
                "Rules broken by events",
                "None.",
                "ops",
                ((rate(f"kvbm_catalog_anomalies_total{{{_C}}}", "rule"), "{{rule}}"),),
            ),
            Panel(
                "What is no event of ours, or is refused",
                "None.",
                "ops",
                tuple(
                    (rate(f"kvbm_catalog_{name}_total{{{_C}}}"), name)
                    for name in ("poison", "foreign", "newer", "rows_refused", "namespaces_refused", "routes_refused")
                ),
            ),
        ),
    ),
    Row(
        "What is held, and is there room?",
        (
            Panel(
                "Blocks by tier",
                "Full tiers are normal: blocks are evicted when others need room.",
                "short",
                ((f"sum by (instance, tier) (kvbm_catalog_residencies{{{_C}}})", "{{instance}} {{tier}}"),),
            ),
            Panel(
                "Blocks claimed for pools",
                "What the object store holds.",
                "short",
                ((f"max by (pool) (kvbm_catalog_claims{{{_C}}})", "{{pool}}"),),
            ),
            Panel(
                "Index in use",
                "Of catalog.capacity; what is more is refused.",
                "percentunit",
                ((f"kvbm_catalog_index_entries{{{_C}}} / kvbm_catalog_index_capacity{{{_C}}}", "{{instance}}"),),
            ),
            Panel(
                "Memory of the index",
                "table grows with the blocks held.",
                "bytes",
                ((f"kvbm_catalog_index_bytes{{{_C}}}", "{{instance}} {{part}}"),),
            ),
            Panel(
                "Age at which blocks are wanted again, or evicted",
                "A tier is worth its room where blocks are wanted later than the hotter tier evicts them.",
                "s",
                tuple(
                    (
                        quantile(0.5, f"kvbm_catalog_{what}_age_seconds_bucket{{{_C}}}", "le, tier"),
                        f"{what} {{{{tier}}}}",
                    )
                    for what in ("wanted", "evicted")
                ),
            ),
            Panel(
                "Blocks evicted that nobody wanted again",
                "Where most are, the tier is too small, or stores what nobody wants.",
                "ops",
                ((rate(f"kvbm_catalog_evicted_unused_total{{{_C}}}", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Bytes put in the object store",
                "raw over stored is the ratio of compression.",
                "Bps",
                ((rate(f"kvbm_catalog_object_put_bytes_total{{{_C}}}", "form"), "{{form}}"),),
            ),
        ),
    ),
    Row(
        "Do instances read from each other?",
        (
            Panel(
                "Bytes read",
                "By way and distance; 0 is the same node.",
                "Bps",
                (
                    (
                        rate(f"kvbm_catalog_transfer_bytes_total{{{_C}}}", "transport, distance"),
                        "{{transport}} {{distance}}",
                    ),
                ),
            ),
            Panel(
                "Rate of a read, median",
                "GB/s by memory. Below 100 MB/s, computing is as quick.",
                "Bps",
                (
                    (
                        quantile(
                            0.5,
                            f"kvbm_catalog_transfer_bytes_per_second_bucket{{{_C}}}",
                            "le, transport, distance",
                        ),
                        "{{transport}} {{distance}}",
                    ),
                ),
            ),
            Panel(
                "Reads that brought nothing",
                "Near 0; peer.unread in the logs says why.",
                "ops",
                (
                    (
                        rate(f"kvbm_catalog_transfer_failures_total{{{_C}}}", "transport, distance"),
                        "{{transport}} {{distance}}",
                    ),
                ),
            ),
            Panel(
                "Bytes lent",
                "Whose blocks others read.",
                "Bps",
                ((rate(f"kvbm_catalog_lent_bytes_total{{{_C}}}", "exported_instance"), "{{exported_instance}}"),),
            ),
            Panel(
                "Blocks lent, and readers",
                "Below transport.lent_blocks and transport.connections.",
                "short",
                (
                    (f"max by (exported_instance) (kvbm_catalog_lent_blocks{{{_C}}})", "{{exported_instance}} blocks"),
                    (
                        f"max by (exported_instance) (kvbm_catalog_lending_connections{{{_C}}})",
                        "{{exported_instance}} readers",
                    ),
                ),
            ),
            Panel(
                "What was not lent",
                "not_held is normal; unproved and unopened near 0; busy and crowded want more room.",
                "ops",
                ((rate(f"kvbm_catalog_lending_refusals_total{{{_C}}}", "why"), "{{why}}"),),
            ),
        ),
    ),
    Row(
        "What do the catalogs take?",
        (
            Panel("Memory", "Of the process.", "bytes", ((f"process_resident_memory_bytes{{{_C}}}", "{{instance}}"),)),
            Panel(
                "CPU",
                "Cores; one loop answers, so 1 is full.",
                "short",
                ((f"rate(process_cpu_seconds_total{{{_C}}}[$__rate_interval])", "{{instance}}"),),
            ),
            Panel(
                "Open files",
                "Of those it may have.",
                "percentunit",
                ((f"process_open_fds{{{_C}}} / process_max_fds{{{_C}}}", "{{instance}}"),),
            ),
        ),
    ),
)
