"""What the dashboards are made of: panels below headlines, and Grafana's JSON of them."""

from __future__ import annotations

from typing import Any, NamedTuple

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDE, _COLUMNS, _HEIGHT, _STAT_HEIGHT = 8, 24, 8, 4
GOOD, BAD, SOSO = "green", "red", "orange"


class Panel(NamedTuple):
    """One panel.

    Attributes:
        says: the question it answers, or how it should look.
        unit: of Grafana.
        queries: expression and legend of each.
        kind: of Grafana's panels. width: of 24 columns.
        steps: colours from values on, of a stat or of a state.
    """

    title: str
    says: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = _WIDE
    steps: tuple[tuple[float | None, str], ...] = ()


class Row(NamedTuple):
    """Panels below one headline, a question."""

    title: str
    panels: tuple[Panel, ...]


def stat(title: str, says: str, unit: str, expr: str, *steps: tuple[float | None, str]) -> Panel:
    return Panel(title, says, unit, ((expr, ""),), "stat", 4, steps or ((None, GOOD), (1, BAD)))


def rate(series: str, by: str = "") -> str:
    return f"sum by ({by}) (rate({series}[$__rate_interval]))" if by else f"sum(rate({series}[$__rate_interval]))"


def quantile(of: float, series: str, by: str = "le") -> str:
    return f"histogram_quantile({of}, {rate(series, by)})"


def dashboard(uid: str, title: str, rows: tuple[Row, ...], variables: list[dict[str, Any]]) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        left = height = 0
        for one in row.panels:
            if left + one.width > _COLUMNS:
                left, top = 0, top + height
            height = _STAT_HEIGHT if one.kind == "stat" else _HEIGHT
            panels.append(_panel(one, len(panels) + 1, {"x": left, "y": top, "w": one.width, "h": height}))
            left += one.width
        top += height
    return {
        "uid": uid,
        "title": title,
        "tags": ["kvbm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), *variables]},
        "links": [{"type": "dashboards", "tags": ["kvbm"], "title": "kvbm", "asDropdown": False, "includeVars": False}],
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps = [{"value": value, "color": colour} for value, colour in panel.steps] or [{"value": None, "color": GOOD}]
    options: dict[str, Any] = {
        "stat": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "background"},
        "state-timeline": {"showValue": "never", "mergeValues": True},
        "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }[panel.kind]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "color": {"mode": "thresholds" if panel.steps else "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": steps},
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": _SOURCE, "expr": expr, "legendFormat": legend or "__auto"}
            for at, (expr, legend) in enumerate(panel.queries)
        ],
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
