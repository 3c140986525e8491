"""`kvbm bench`: what this machine does with the native core and its pools."""

from kvbm.workload.bench.objects import ObjectsOptions
from kvbm.workload.bench.pools import PoolsOptions
from kvbm.workload.bench.report import BENCHES, BenchOptions, run_bench

__all__ = ["BENCHES", "BenchOptions", "ObjectsOptions", "PoolsOptions", "run_bench"]
