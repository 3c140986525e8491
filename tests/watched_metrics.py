"""Which metrics, and which of their labels, the rules and dashboards of deploy/ read.

What those of a release read is kept with it, in tests/golden/VERSION/metrics.json: whoever upgrades kvbm goes on with
the dashboards they have.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tools import reference

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy" / "prometheus" / "kvbm.rules.yml"
DASHBOARDS = ROOT / "deploy" / "grafana"
OF_PROMETHEUS = {"job", "instance", "le"}  # labels that each scrape, or each histogram, has
_WORD = re.compile(r"[a-z_]+")


def rules() -> list[dict[str, Any]]:
    """Every alert."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def names_in(expr: str) -> set[str]:
    """Series that an expression reads."""
    return set(re.findall(r"\bkvbm_[a-z_]+[a-z]\b", expr))


def family_of(series: str) -> str:
    """The metric that a series is of."""
    return re.sub(r"_(bucket|sum|count)$", "", series)


def labels_of(series: str) -> set[str]:
    """Labels that a series of ours has at Prometheus. Raises KeyError: there is no such metric."""
    own = {
        one.name: set(one.labels)
        for one in (*reference.catalog_metrics(), *reference.manager_metrics(), *reference.vllm_metrics())
    }[family_of(series)]
    renamed = {"exported_instance" if label == "instance" else label for label in own}
    beside = {"engine", "model_name"} if series.startswith("kvbm_vllm_") else set()
    return renamed | beside | OF_PROMETHEUS


def read_by_rules_and_dashboards() -> dict[str, list[str]]:
    """The labels that are read of each series, beside those that every scrape has."""
    found: dict[str, set[str]] = {}
    for text in (*_texts_of_rules(), *_texts_of_dashboards()):
        words = set(_WORD.findall(text))
        for series in names_in(text):
            found.setdefault(series, set()).update((labels_of(series) - OF_PROMETHEUS) & words)
    return {series: sorted(found[series]) for series in sorted(found)}


def _texts_of_rules() -> list[str]:
    return [" ".join((rule["expr"], *rule["annotations"].values())) for rule in rules()]


def _texts_of_dashboards() -> list[str]:
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        model = json.loads(path.read_text())
        found += [
            f"{target['expr']} {target.get('legendFormat', '')}"
            for panel in model["panels"]
            for target in panel.get("targets", ())
        ]
        found += [one["query"]["query"] for one in model["templating"]["list"] if isinstance(one.get("query"), dict)]
    return found
