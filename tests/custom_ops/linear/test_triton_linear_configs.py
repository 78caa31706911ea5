"""Which configurations the kernels of linears get."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compile_and_serve.custom_ops.linear.triton_linear_configs import SmallBatchConfig, few_outputs_config, gemv_config, small_batch_config


@pytest.mark.parametrize(("num_rows", "inner", "silu"), [(28672, 4096, True), (1024, 1024, False), (576, 576, False)])
def test_configurations_cover_every_row(num_rows: int, inner: int, silu: bool) -> None:
    rows, warps, per_sm, _ = gemv_config(num_rows, inner, silu)
    assert rows >= 1
    assert per_sm >= 1
    assert warps in (1, 2, 4, 8, 16)
    config = small_batch_config(8, num_rows, inner, silu, 132)
    assert -(-num_rows // config.block_o) * config.splits < 1 << 16


@pytest.mark.parametrize(
    ("num_rows", "inner", "silu", "splits", "stages"),
    [
        (5120, 2880, False, 3, 3),
        (5120, 2048, False, 3, 3),
        (2560, 1024, False, 4, 3),  # more splits would have no columns
        (1280, 4096, False, 8, 3),
        (2880, 4096, False, 2, 4),
        (2048, 4096, False, 4, 4),
        (3648, 2048, False, 2, 4),
        (2816, 2048, True, 2, 4),
        (6144, 4096, False, 1, 4),
        (14336, 4096, True, 1, 4),
    ],
)
def test_programs_run_at_once(num_rows: int, inner: int, silu: bool, splits: int, stages: int) -> None:
    config = small_batch_config(64, num_rows, inner, silu, 132)
    assert config == SmallBatchConfig(64, 128, splits, stages, 4)
    if splits > 1:
        assert -(-num_rows // 64) * splits <= 132 * (2 if stages == 3 else 1)


@pytest.mark.parametrize(
    ("num_rows", "inner", "block_o", "splits"),
    [(32, 2880, 32, 6), (128, 2048, 128, 8), (64, 4096, 64, 8), (1, 520, 16, 3), (100, 99, 128, 1)],
)
def test_few_outputs(num_rows: int, inner: int, block_o: int, splits: int) -> None:
    config = few_outputs_config(num_rows, inner)
    assert (config.block_o, config.splits, config.block_t) == (block_o, splits, 16)
    assert config.prefetch == (inner % 8 == 0)
    blocks = -(-inner // config.block_i)
    assert -(-blocks // splits) * (splits - 1) < blocks  # the last split has columns, too
