"""The dashboard of engines: managers that programs embed, and vLLM's, in the order in which an operator asks."""

from __future__ import annotations

from tools.dashboards.panels import BAD, GOOD, SOSO, Panel, Row, quantile, rate, stat

_E = 'job=~"$job",instance=~"$instance",exported_instance=~"$engine"'
_V = 'job=~"$job",instance=~"$instance"'  # vLLM's metrics have no label of kvbm's instance
_SLOTS = f"sum by (tier) (kvbm_manager_slots{{{_E}}})"
_PINNED = (
    f"sum by (tier) (kvbm_manager_held_blocks{{{_E}}} - kvbm_manager_evictable_blocks{{{_E}}}) / "
    f"sum by (tier) (kvbm_manager_slots{{{_E}}})"
)


def _by_engine(name: str) -> str:
    return rate(f"kvbm_manager_{name}_total{{{_E}}}", "exported_instance")


def _vllm(name: str, by: str = "") -> str:
    return rate(f"kvbm_vllm_{name}{{{_V}}}", by)


def _engine_stat(title: str, says: str, metric: str) -> Panel:
    return stat(title, says, "short", f"sum(increase(kvbm_manager_{metric}_total{{{_E}}}[$__range]))")


ENGINES = (
    Row(
        "Is it well?",
        (
            stat(
                "Parts with trouble",
                "journal, place, stream, tiers, objects or namespaces; manager.trouble() says more.",
                "short",
                f"sum(kvbm_manager_trouble{{{_E}}})",
            ),
            _engine_stat("Failed copies", "Copies that a device or store did not carry out.", "failed_copies"),
            _engine_stat("Corrupt blocks", "Wrong bytes that a device or store returned; 0.", "corrupt_blocks"),
            stat(
                "Slots quarantined",
                "Of copies nobody can confirm; they come back with a restart.",
                "short",
                f"sum(kvbm_manager_quarantined_slots{{{_E}}})",
            ),
            stat(
                "Events not in the journal",
                "Few: the journal keeps up.",
                "short",
                f"max(kvbm_manager_applied_offset{{{_E}}} - kvbm_manager_durable_offset{{{_E}}})",
                (None, GOOD),
                (10_000, SOSO),
                (100_000, BAD),
            ),
            stat(
                "Events not on the stream",
                "Few while NATS is there; no router knows of them.",
                "short",
                f"max(kvbm_manager_applied_offset{{{_E}}} - kvbm_manager_published_offset{{{_E}}})",
                (None, GOOD),
                (10_000, SOSO),
                (100_000, BAD),
            ),
            Panel(
                "Trouble",
                "1 while a part does not work.",
                "short",
                ((f"kvbm_manager_trouble{{{_E}}}", "{{exported_instance}} {{part}}"),),
                "state-timeline",
                24,
                ((None, GOOD), (1, BAD)),
            ),
        ),
    ),
    Row(
        "What does it save?",
        (
            Panel(
                "Hit ratio",
                "Blocks that requests got, of those they asked for; as prompts allow.",
                "percentunit",
                (
                    (
                        f"{_by_engine('hit_blocks')} / ({_by_engine('hit_blocks')} + {_by_engine('missed_blocks')})",
                        "{{exported_instance}}",
                    ),
                ),
            ),
            Panel(
                "Blocks got, by tier",
                "Instead of computing them.",
                "ops",
                (
                    (rate(f"kvbm_manager_hit_blocks_total{{{_E}}}", "tier"), "{{tier}}"),
                    (rate(f"kvbm_manager_peer_hits_total{{{_E}}}"), "of other instances"),
                    (rate(f"kvbm_manager_missed_blocks_total{{{_E}}}"), "missed"),
                ),
            ),
            Panel(
                "Requests that did not wait for their blocks",
                "Near 0; else a tier is slower than onboard.wait_s.",
                "ops",
                ((_by_engine("late_acquires"), "{{exported_instance}}"),),
            ),
            Panel(
                "Requests that wait for bytes, and copies",
                "A few.",
                "short",
                (
                    (f"sum(kvbm_manager_waiting_requests{{{_E}}})", "requests waiting"),
                    (f"sum(kvbm_manager_copies_in_flight{{{_E}}})", "copies"),
                    (f"sum(kvbm_manager_late_slots{{{_E}}})", "slots of late copies"),
                ),
            ),
            Panel(
                "Blocks computed",
                "What the engine declared full.",
                "ops",
                ((_by_engine("created_blocks"), "{{exported_instance}}"),),
            ),
        ),
    ),
    Row(
        "Is there room?",
        (
            Panel(
                "Slots in use",
                "Full is normal but for HBM: what is evictable makes room.",
                "percentunit",
                (
                    (
                        f"1 - sum by (tier) (kvbm_manager_free_slots{{{_E}}}) / {_SLOTS}",
                        "{{tier}}",
                    ),
                ),
            ),
            Panel(
                "Blocks that nobody can evict",
                "Held and pinned, or kept, of all slots; near 1, allocations are short.",
                "percentunit",
                (
                    (
                        _PINNED,
                        "{{tier}} pinned",
                    ),
                    (
                        f"sum by (tier) (kvbm_manager_kept_blocks{{{_E}}}) / {_SLOTS}",
                        "{{tier}} kept",
                    ),
                ),
            ),
            Panel(
                "Allocations that got no slots",
                "0; else HBM is short: everything else is pinned.",
                "ops",
                (
                    (
                        _by_engine("short_allocations"),
                        "{{exported_instance}}",
                    ),
                ),
            ),
            Panel(
                "Blocks brought to colder tiers",
                "What is kept for later.",
                "ops",
                ((rate(f"kvbm_manager_offloaded_blocks_total{{{_E}}}", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Blocks that were not, by why",
                "Near 0; queue and room mean that colder tiers do not keep up, journal that it takes nothing.",
                "ops",
                ((rate(f"kvbm_manager_skipped_offloads_total{{{_E}}}", "why"), "{{why}}"),),
            ),
            Panel(
                "Age at which blocks are wanted again, or evicted",
                "A tier is worth its room where blocks are wanted later than the hotter tier evicts them.",
                "s",
                tuple(
                    (
                        quantile(0.5, f"kvbm_manager_{what}_age_seconds_bucket{{{_E}}}", "le, tier"),
                        f"{what} {{{{tier}}}}",
                    )
                    for what in ("wanted", "evicted")
                ),
            ),
            Panel(
                "Tenants with the most blocks",
                "Where tenants have shares.",
                "short",
                ((f"topk(10, sum by (tier, tenant) (kvbm_manager_share_held_blocks{{{_E}}}))", "{{tier}} {{tenant}}"),),
            ),
        ),
    ),
    Row(
        "What do others give, and get?",
        (
            Panel(
                "Bytes read from other instances",
                "By way.",
                "Bps",
                ((rate(f"kvbm_manager_peer_bytes_total{{{_E}}}", "transport"), "{{transport}}"),),
            ),
            Panel(
                "Reads from other instances that failed",
                "Near 0; a few blocks are missing where the catalog is a moment behind.",
                "ops",
                (
                    (rate(f"kvbm_manager_peer_failed_reads_total{{{_E}}}"), "failed reads"),
                    (rate(f"kvbm_manager_peer_missing_blocks_total{{{_E}}}"), "missing blocks"),
                    (rate(f"kvbm_manager_peer_corrupt_blocks_total{{{_E}}}"), "corrupt blocks"),
                ),
            ),
            Panel(
                "Bytes lent",
                "By way.",
                "Bps",
                ((rate(f"kvbm_manager_lent_bytes_total{{{_E}}}", "transport"), "{{transport}}"),),
            ),
            Panel(
                "Objects put",
                "found: others had put them already.",
                "ops",
                ((rate(f"kvbm_manager_object_puts_total{{{_E}}}", "result"), "{{result}}"),),
            ),
            Panel(
                "Objects read",
                "missing and failed near 0, corrupt 0.",
                "ops",
                ((rate(f"kvbm_manager_object_reads_total{{{_E}}}", "result"), "{{result}}"),),
            ),
        ),
    ),
    Row(
        "Inside vLLM",
        (
            Panel(
                "Blocks got, by tier",
                "Instead of computing them.",
                "ops",
                ((rate(f"kvbm_vllm_hit_blocks_total{{{_V}}}", "tier"), "{{tier}}"),),
            ),
            Panel(
                "Copies of a rank",
                "Bytes a second while it copies.",
                "Bps",
                (
                    (
                        f"{_vllm('loaded_bytes_total')} / {_vllm('load_seconds_sum')}",
                        "HOST to HBM",
                    ),
                    (
                        f"{_vllm('stored_bytes_total')} / {_vllm('store_seconds_sum')}",
                        "HBM to HOST",
                    ),
                ),
            ),
            Panel(
                "Blocks predicted, and delivered",
                "Equal but for little.",
                "ops",
                (
                    (rate(f"kvbm_vllm_predicted_blocks_total{{{_V}}}"), "predicted"),
                    (rate(f"kvbm_vllm_delivered_blocks_total{{{_V}}}"), "delivered"),
                    (rate(f"kvbm_vllm_undelivered_blocks_total{{{_V}}}", "why"), "undelivered: {{why}}"),
                ),
            ),
            Panel(
                "Failed, late, skipped, corrupt",
                "Near 0, corrupt 0.",
                "ops",
                tuple(
                    (rate(f"kvbm_vllm_{name}_total{{{_V}}}"), name.replace("_", " "))
                    for name in ("failed_loads", "failed_stores", "late_acquires", "stores_skipped", "corrupt_blocks")
                ),
            ),
        ),
    ),
)
