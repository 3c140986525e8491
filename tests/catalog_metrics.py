"""What a catalog's metrics say now, as attributes."""

from __future__ import annotations

from types import SimpleNamespace

from kvbm.catalog.edge.metrics import ROWS
from kvbm.catalog.service import CatalogService


def metrics_of(catalog: CatalogService) -> SimpleNamespace:
    """The value of each row that has no labels, by its name."""
    return SimpleNamespace(**{row.name: row.get(catalog) for row in ROWS if not row.labels})
