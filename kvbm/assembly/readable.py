"""The readable specification in place of what runs: for `kvbm-replay --reference`, which proves the native
parts by it.
"""

from __future__ import annotations

from kvbm.core.ages import ReadableAges
from kvbm.core.backend import REFERENCE
from kvbm.core.columns import decode_columns
from kvbm.core.fold import Residencies
from kvbm.reference.cluster_index import ReferenceIndex
from kvbm.reference.history import StayHistory
from kvbm.replay.cli import Parts


def readable_parts() -> Parts:
    """What `kvbm-replay` runs on with --reference."""
    return Parts(REFERENCE, Residencies, decode_columns, ReferenceIndex, ReadableAges, StayHistory)
