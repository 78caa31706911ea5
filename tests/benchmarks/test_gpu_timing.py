"""`benchmarks.gpu_timing`: what a kernel takes by itself when kernels overlap."""

from __future__ import annotations

from benchmarks.gpu_timing import own_times


def test_a_kernel_that_started_early_does_not_pay_for_its_wait() -> None:
    intervals = [("a", 0.0, 10.0), ("b", 1.0, 12.0), ("a", 2.0, 17.0), ("c", 20.0, 21.0)]
    assert own_times(reversed(intervals)) == {"a": [10.0, 5.0], "b": [2.0], "c": [1.0]}
