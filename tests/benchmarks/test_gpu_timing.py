"""`benchmarks.gpu_timing`: what a kernel takes by itself when kernels overlap."""

from __future__ import annotations

from benchmarks.gpu_timing import _by_kind, own_times


def test_a_kernel_that_started_early_does_not_pay_for_its_wait() -> None:
    intervals = [("a", 0.0, 10.0), ("b", 1.0, 12.0), ("a", 2.0, 17.0), ("c", 20.0, 21.0)]
    assert own_times(reversed(intervals)) == {"a": [10.0, 5.0], "b": [2.0], "c": [1.0]}


def test_prompts_are_divided_into_products_and_flas_kernels() -> None:
    intervals = [("nvjet_sm90", 0.0, 1000.0), ("chunk_fwd_kernel_o", 1000.0, 2000.0), ("_rms_norm_kernel", 2100.0, 2500.0)]
    row = _by_kind(intervals, {"chunk_fwd_kernel_o"}, 5)
    assert (row["products_ms"], row["fla_ms"], row["others"]) == (1.0, 1.0, {"_rms_norm_kernel": 0.4})
    assert row["device_ms"] == 2.5  # with the gap
    assert (row["ratio"], row["kernels_ratio"]) == (1.25, 1.2)
