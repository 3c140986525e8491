"""Grafana's dashboards of kvbm. `python -m tools.dashboards.write` writes deploy/grafana."""
