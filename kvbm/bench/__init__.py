"""`kvbm bench`: what this machine does with the native core and its pools."""

from kvbm.bench.fetch import FetchOptions
from kvbm.bench.objects import ObjectsOptions
from kvbm.bench.page import PageOptions
from kvbm.bench.pools import PoolsOptions
from kvbm.bench.report import BENCHES, BenchOptions, run_bench

__all__ = ["BENCHES", "BenchOptions", "FetchOptions", "ObjectsOptions", "PageOptions", "PoolsOptions", "run_bench"]
