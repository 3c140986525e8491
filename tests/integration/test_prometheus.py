"""Rules and dashboards of deploy/ on Debian's Prometheus, over metrics of a real catalog and of real managers."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kvbm.manager.stats import TROUBLED_PARTS
from tests.alert_cases import ALERT_CASES, ALSO, promtool_tests
from tests.eventually import eventually
from tests.nats_fixture import started
from tests.prometheus_site import ROOT, RULES, WAIT_S, MeasuredSite, Prometheus, has_rates, prometheus, promtool
from tests.releases import GOLDEN, METRICS
from tests.watched_metrics import labels_of, names_in, read_by_rules_and_dashboards, rules
from tools import reference
from tools.dashboards.write import FOLDER, dashboards, text_of

ALERT_WAIT_S = 600.0  # rules wait for minutes themselves
DASHBOARDS = sorted(path.name for path in FOLDER.glob("*.json"))
UNITS = {"short", "s", "bytes", "Bps", "ops", "reqps", "percentunit"}
# Panels whose queries find nothing on the site below, and why.
EMPTY = {
    "Alerts": "no rule waits or fires where all is well",
    "Tenants with the most blocks": "nobody has a share",
    "Inside vLLM": "vLLM alone exports it; tests/engines/vllm/test_stats.py",
}


class Watched(NamedTuple):
    """A site, and the Prometheus that has scraped it."""

    site: MeasuredSite
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with ExitStack() as opened:
        site = MeasuredSite(tmp_path_factory.mktemp("measured"), opened)
        running = opened.enter_context(prometheus(site.targets))
        eventually(lambda: has_rates(running), "not all is scraped", WAIT_S)
        yield Watched(site, running)


def unknown_names(exprs: list[str], exported: dict[str, str]) -> set[str]:
    """Metrics that nobody exports. vLLM's are those that its connector counts."""
    series = {one.name for one in reference.vllm_metrics()}
    for name, kind in exported.items():
        series |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"} if kind == "histogram" else {name}
    histograms = {one.name for one in reference.vllm_metrics() if one.kind == "histogram"}
    series |= {f"{name}{end}" for name in histograms for end in ("_bucket", "_sum", "_count")}
    return set().union(*map(names_in, exprs)) - series


# -- rules ------------------------------------------------------------------------------------------------------------


def test_each_rule_says_how_bad_it_is_what_it_means_and_what_to_do() -> None:
    checked = promtool("check", "rules", "--lint-fatal", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["for"] != "0m", rule["alert"]
        for text in rule["annotations"].values():
            for label in re.findall(r"\$labels\.(\w+)", text):
                assert label in {"job"}.union(*map(labels_of, names_in(rule["expr"]))), (rule["alert"], label)


def test_each_rule_waits_fires_and_ends_when_it_should_and_not_in_the_nearest_harmless_case(
    tmp_path: Path,
) -> None:
    assert run_cases(rules(), tmp_path) == ""


def test_a_rule_that_is_wrong_does_not_pass_its_case(tmp_path: Path) -> None:
    by_name = {rule["alert"]: rule for rule in rules()}
    hasty = by_name["KvbmCatalogNotReady"] | {"for": "0m"}
    blunt = by_name["KvbmIndexNearCapacity"] | {"expr": by_name["KvbmIndexNearCapacity"]["expr"].replace("0.9", "0.89")}
    silent = by_name["KvbmPeersSlow"] | {"expr": by_name["KvbmPeersSlow"]["expr"].replace("1e8", "1e6")}
    for wrong in (hasty, blunt, silent):
        assert "FAILED" in run_cases([wrong], tmp_path), wrong["alert"]


def run_cases(tried: list[dict[str, Any]], folder: Path) -> str:
    """What promtool says against these rules; "" when all is well."""
    files = []
    for rule in tried:
        name = rule["alert"]
        assert name in ALERT_CASES, f"{name} has no case in tests/alert_cases.py"
        (folder / f"{name}.rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [rule]}]}))
        tests = promtool_tests(name, ALERT_CASES[name], ALSO.get(name, []))
        (folder / f"{name}.yml").write_text(
            yaml.safe_dump({"rule_files": [f"{name}.rules.yml"], "evaluation_interval": "1m", "tests": tests})
        )
        files.append(f"{name}.yml")
    done = promtool("test", "rules", *files, folder=folder)
    assert all(f"Unit Testing:  {name}" in done.stdout for name in files), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_each_case_is_of_a_rule_and_waits_fires_and_ends() -> None:
    assert list(ALERT_CASES) == [rule["alert"] for rule in rules()]
    for name, case in ALERT_CASES.items():
        assert all(one < other for one, other in pairwise((case.before, case.pending, case.firing, case.ended))), name
        assert case.harmless, name


def test_each_metric_and_label_of_a_rule_is_exported(watched: Watched) -> None:
    assert unknown_names([rule["expr"] for rule in rules()], watched.site.exported()) == set()
    for rule in rules():
        for metric, matched in re.findall(r"\b(kvbm_[a-z_]+)\{([^}]*)\}", rule["expr"]):
            for label in re.findall(r"(\w+)(?:=|!=|=~|!~)\"", matched):
                assert label in labels_of(metric), (rule["alert"], metric, label)


def test_prometheus_evaluates_all_rules_and_none_fires_where_all_is_well(watched: Watched) -> None:
    running = watched.prometheus

    def evaluated() -> list[dict[str, Any]]:
        found = [rule for group in running.get("rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else []

    found = eventually(evaluated, "not all rules are evaluated", WAIT_S)
    assert sorted(rule["name"] for rule in found) == sorted(ALERT_CASES)
    assert {rule["name"]: rule.get("lastError", "") for rule in found if rule["health"] != "ok"} == {}
    assert running.alerts("firing") == {}


def test_the_index_says_how_full_it_is(watched: Watched) -> None:
    held = "sum(kvbm_catalog_residencies) + sum(kvbm_catalog_claims)"
    eventually(
        lambda: watched.prometheus.query(f"sum(kvbm_catalog_index_entries) == {held} > 0"),
        "entries are others than residencies and claims",
        state=lambda: watched.prometheus.query("kvbm_catalog_index_entries"),
    )
    assert watched.prometheus.query("kvbm_catalog_index_capacity > kvbm_catalog_index_entries")


def test_the_page_speaks_of_each_alert_and_of_no_other() -> None:
    page = (ROOT / "docs" / "monitor.md").read_text()
    assert set(re.findall(r"\bKvbm[A-Z]\w+", page)) == set(ALERT_CASES)
    shown = promtool("check", "config", ROOT / "deploy" / "prometheus" / "prometheus.yml")
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_alerts_that_another_one_tells_are_left_out_and_the_page_says_which() -> None:
    path = ROOT / "deploy" / "prometheus" / "alertmanager.yml"
    page = (ROOT / "docs" / "monitor.md").read_text().partition("### One cause, one message")[2].partition("## ")[0]
    rows = {row[1]: row[2] for line in page.splitlines() if len(row := line.split("|")) == 4}
    labels = {rule["alert"]: {"job"}.union(*map(labels_of, names_in(rule["expr"]))) for rule in rules()}
    sources, targets = set(), set()
    for rule in yaml.safe_load(path.read_text())["inhibit_rules"]:
        (source,), (target, *narrowed) = rule["source_matchers"], rule["target_matchers"]
        from_these, to_these = (set(re.findall(r"\bKvbm\w+", one)) for one in (source, target))
        sources, targets = sources | from_these, targets | to_these
        for one in from_these:
            assert set(re.findall(r"\bKvbm\w+", rows[f" `{one}` "])) >= to_these
        for name in to_these | from_these:
            assert labels[name] >= set(rule.get("equal", ())), name
        for matcher in narrowed:
            name, value = re.fullmatch(r'(\w+) = "(\w+)"', matcher).groups()  # type: ignore[union-attr]
            assert name == "part" and value in TROUBLED_PARTS and labels[min(to_these)] >= {name}
    assert not sources & targets, "what is left out leaves nothing out"
    assert targets < set(ALERT_CASES) and sources < set(ALERT_CASES)
    if shutil.which("amtool") is not None:
        shown = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stdout + shown.stderr


@pytest.mark.nightly
def test_a_nats_that_is_killed_is_told_and_its_return_ends_the_alerts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with ExitStack() as opened:
        folder = tmp_path_factory.mktemp("alerted")
        site = MeasuredSite(folder, opened)
        running = opened.enter_context(prometheus(site.targets, "1s"))
        wanted = {"KvbmCatalogDegraded", "KvbmNatsAway"}
        eventually(lambda: running.query("kvbm_catalog_degraded == 0"), "nothing is scraped", WAIT_S)
        assert not wanted & running.alerts("firing").keys()
        server = site.pair.site.server
        port = int(server.url.rpartition(":")[2])
        server._process.kill()
        server.stop()
        firing = eventually(
            lambda: found if wanted <= (found := running.alerts("firing")).keys() else {},
            "the alerts do not fire",
            ALERT_WAIT_S,
            lambda: running.query("kvbm_catalog_degraded_parts == 1"),
        )
        for name in wanted:
            told = " ".join(firing[name]["annotations"].values())
            assert site.targets["kvbm-catalog"][0] in told
            assert "no value" not in told and "error" not in told
        assert not {"KvbmSqlAway", "KvbmFolderRefuses"} & firing.keys()
        again = started(folder / "lend" / "nats", port)
        opened.callback(again.stop)
        eventually(lambda: not running.alerts("firing"), "the alerts do not end", ALERT_WAIT_S)


# -- dashboards -------------------------------------------------------------------------------------------------------


def loaded(name: str) -> dict[str, Any]:
    model: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return model


def panels_of(model: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each panel with the headline it stands below."""
    found, row = [], ""
    for panel in model["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            found.append((row, panel))
    return found


def asked(expr: str) -> str:
    """An expression as Grafana asks it, with all chosen."""
    for name, value in (
        ("job", ".*"),
        ("instance", ".*"),
        ("engine", ".*"),
        ("__rate_interval", "1m"),
        ("__range", "1h"),
    ):
        expr = re.sub(rf"\${name}\b", value, expr)
    assert "$" not in expr, expr
    return expr


def faults_of(model: dict[str, Any], watched: Watched) -> list[str]:
    """What is wrong with a dashboard's queries on a Prometheus that has scraped everything."""
    found, exported = [], watched.site.exported()
    for row, panel in panels_of(model):
        reason = EMPTY.get(panel["title"]) or EMPTY.get(row)
        for target in panel["targets"]:
            lost = unknown_names([target["expr"]], exported)
            found += [f"{panel['title']}: nobody exports {name}" for name in sorted(lost)]
            series = watched.prometheus.query(asked(target["expr"]))
            if not series and not reason:
                found.append(f"{panel['title']}: {target['expr']} finds nothing")
            elif series and reason:
                found.append(f"{panel['title']} finds something, though {reason}")
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_finds_something(name: str, watched: Watched) -> None:
    assert faults_of(loaded(name), watched) == []


def test_a_metric_that_went_away_is_found(watched: Watched) -> None:
    model = copy.deepcopy(loaded("kvbm-cluster.json"))
    panel = next(panel for _, panel in panels_of(model) if "view_age" in panel["targets"][0]["expr"])
    panel["targets"][0]["expr"] = panel["targets"][0]["expr"].replace("view_age_seconds", "view_age_s")
    title = panel["title"]
    assert faults_of(model, watched) == [
        f"{title}: nobody exports kvbm_catalog_view_age_s",
        f"{title}: {panel['targets'][0]['expr']} finds nothing",
    ]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_of_a_dashboard_has_values(name: str, watched: Watched) -> None:
    _, *variables = loaded(name)["templating"]["list"]
    for one in variables:
        asks = re.fullmatch(r"label_values\((?P<series>.*), (?P<label>\w+)\)", one["query"]["query"])
        assert asks is not None, one["name"]
        found = watched.prometheus.get(f"label/{asks['label']}/values", **{"match[]": asked(asks["series"])})
        assert found, (one["name"], asks["series"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_that_grafana_can_show(name: str) -> None:
    model = loaded(name)
    assert model["uid"] == name.removesuffix(".json") and model["title"] and model["schemaVersion"] >= 36
    known = {one["name"] for one in model["templating"]["list"]}
    assert {"datasource", "job", "instance"} <= known
    ids = [panel["id"] for panel in model["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in model["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["w"] and at["h"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    for _, panel in panels_of(model):
        assert panel["type"] in ("timeseries", "stat", "state-timeline") and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        steps = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert steps[0] is None and steps[1:] == sorted(steps[1:])
        refs = [target["refId"] for target in panel["targets"]]
        assert refs and len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval", "__range"} <= known
            for metric, matched in re.findall(r"\b(kvbm_[a-z_]+)\{([^}]*)\}", target["expr"]):
                assert {"job", "instance"} <= set(re.findall(r"(\w+)=", matched)) <= labels_of(metric), target["expr"]
            for metric in names_in(target["expr"]):
                assert f"{metric}{{" in target["expr"] or "build_info" in metric, f"{metric} of all jobs"


def test_the_dashboards_are_those_that_the_tool_writes() -> None:
    written = {name: text_of(model) for name, model in dashboards().items()}
    assert written == {name: (FOLDER / name).read_text() for name in DASHBOARDS}, "python -m tools.dashboards.write"


# -- a dashboard of a version behind ----------------------------------------------------------------------------------

RELEASES = sorted(path.parent.name for path in GOLDEN.glob(f"*/{METRICS}"))


def lost_of(read: dict[str, list[str]], exported: dict[str, str]) -> list[str]:
    """What is read, labels by series, and nobody serves: series, and labels of others."""
    lost = unknown_names(list(read), exported)
    there = {series: set(labels) for series, labels in read.items() if series not in lost}
    labels = {f"{series}{{{one}}}" for series, wanted in there.items() for one in wanted - labels_of(series)}
    return sorted(lost | labels)


@pytest.mark.parametrize("release", RELEASES)
def test_what_rules_and_dashboards_of_a_release_read_is_still_served(release: str, watched: Watched) -> None:
    read = json.loads((GOLDEN / release / METRICS).read_text())
    assert len(read) > 90 and lost_of(read, watched.site.exported()) == []


def test_a_metric_or_a_label_that_a_release_had_and_that_went_away_is_found(watched: Watched) -> None:
    read = {"kvbm_catalog_lost": ["part"], "kvbm_catalog_ready": ["colour"], "kvbm_catalog_degraded_parts": ["part"]}
    assert lost_of(read, watched.site.exported()) == ["kvbm_catalog_lost", "kvbm_catalog_ready{colour}"]


def test_what_rules_and_dashboards_read_is_found() -> None:
    assert RELEASES[0] == "0.1.0"
    here = read_by_rules_and_dashboards()
    assert here.keys() >= names_in(" ".join(rule["expr"] for rule in rules()))
    assert here["kvbm_catalog_degraded_parts"] == ["part"]
    assert here["kvbm_manager_trouble"] == ["exported_instance", "part"]
