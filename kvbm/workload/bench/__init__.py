"""`kvbm bench`: what one core of this machine does with the native core."""

from kvbm.workload.bench.report import BENCHES, BenchOptions, run_bench

__all__ = ["BENCHES", "BenchOptions", "run_bench"]
