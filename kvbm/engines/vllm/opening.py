"""From vLLM's configuration to what serves it: is it served at all, by what settings, with which shape and names of blocks."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import structlog

from kvbm.assembly import NATIVE, open_manager
from kvbm.config import Settings
from kvbm.core.errors import PoolError
from kvbm.core.ids import Tier
from kvbm.engines.vllm.identity import Identity, why_not_served
from kvbm.engines.vllm.metadata import HostShare, Ranks
from kvbm.engines.vllm.regions import Regions, regions_of
from kvbm.engines.vllm.requests import Group
from kvbm.engines.vllm.scheduler import Scheduler
from kvbm.engines.vllm.settings import settings_of
from kvbm.pools.host import HostPool

log = structlog.get_logger()
