"""Fewer configurations of fla-core's kernels are tried, and none that it does not have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
import triton

from compile_and_serve.custom_ops.recurrent import fla_configs


def chunk_gated_delta_rule_fwd_kernel_h_blockdim64() -> None: ...


def recompute_w_u_fwd_kernel() -> None: ...


def some_other_kernel() -> None: ...


def kernel(function: object, configs: list[triton.Config]) -> SimpleNamespace:
    """As triton's decorators nest: heuristics, an autotuner, a jitted function."""
    return SimpleNamespace(fn=SimpleNamespace(configs=configs, fn=SimpleNamespace(fn=function)))


def all_configs() -> list[triton.Config]:
    sizes = [(value, warps, stages) for warps in (2, 4) for stages in (2, 3, 4) for value in (32, 64)]
    return [triton.Config({"BV": value}, num_warps=warps, num_stages=stages) for value, warps, stages in sizes]


def test_known_kernels_try_few_configurations() -> None:
    states = kernel(chunk_gated_delta_rule_fwd_kernel_h_blockdim64, all_configs())
    other = kernel(some_other_kernel, all_configs())
    assert fla_configs.limit_configs_of([states, other, states, len, 1]) == (12, 3)
    kept = [(config.kwargs["BV"], config.num_warps, config.num_stages) for config in states.fn.configs]
    assert sorted(kept) == [(32, 4, 2), (32, 4, 3), (64, 4, 3)]
    assert len(other.fn.configs) == 12


def test_a_kernel_whose_configurations_are_unknown_keeps_them() -> None:
    changed = kernel(recompute_w_u_fwd_kernel, all_configs())
    assert fla_configs.limit_configs_of([changed]) == (12, 12)
