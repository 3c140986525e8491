"""Write the Grafana dashboards of deploy/grafana.

python -m tools.dashboards.write          after a change in this folder; a test compares the files
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboards.cluster import CLUSTER
from tools.dashboards.engines import ENGINES
from tools.dashboards.panels import dashboard, variable

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana"


def dashboards() -> dict[str, dict[str, Any]]:
    """Each, by the name of its file."""
    engine = '{__name__=~"kvbm_manager_epoch|kvbm_vllm_loaded_blocks_total"}'
    of_job = engine.replace("}", ',job=~"$job"}')
    return {
        "kvbm-cluster.json": dashboard(
            "kvbm-cluster",
            "kvbm: cluster",
            CLUSTER,
            [
                variable("job", "Job", "label_values(kvbm_catalog_ready, job)"),
                variable("instance", "Catalog", 'label_values(kvbm_catalog_ready{job=~"$job"}, instance)'),
            ],
        ),
        "kvbm-engines.json": dashboard(
            "kvbm-engines",
            "kvbm: engines",
            ENGINES,
            [
                variable("job", "Job", f"label_values({engine}, job)"),
                variable("instance", "Target", f"label_values({of_job}, instance)"),
                variable(
                    "engine",
                    "Instance",
                    'label_values(kvbm_manager_epoch{job=~"$job",instance=~"$instance"}, exported_instance)',
                ),
            ],
        ),
    }


def text_of(model: dict[str, Any]) -> str:
    """A dashboard's file."""
    return json.dumps(model, indent=1) + "\n"


def main() -> None:
    """Write the files."""
    for name, model in dashboards().items():
        (FOLDER / name).write_text(text_of(model))


if __name__ == "__main__":
    main()
