"""The kernel of linears of few tokens compiles for a Hopper GPU (none is needed)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.linear.triton_linear import _small_batch_kernel
from compile_and_serve.custom_ops.linear.triton_linear_configs import few_outputs_config, small_batch_config
from tests.support.hopper import compiled

FLAGS = {"HAS_NORM": False, "HAS_BIAS": True, "GELU": False, "PDL": True, "HAS_ADAPTERS": False, "BLOCK_R": 16, "BLOCK_K": 128,
         "norm_ptr": None, "h_ptr": None, "b_ptr": None, "index_ptr": None, "groups_ptr": None}

def type_of(name):
    special = {"partial_ptr": "*fp32", "counter_ptr": "*i32", "eps": "fp32"}
    return special.get(name, "*bf16" if name.endswith("_ptr") else "i32")

def shared(config, silu_mul, residual):
    constants = FLAGS | {"SILU_MUL": silu_mul, "HAS_RESIDUAL": residual, "BLOCK_T": config.block_t, "BLOCK_O": config.block_o,
                         "BLOCK_I": config.block_i, "SPLITS": config.splits, "STAGES": config.stages, "PREFETCH": config.prefetch}
    constants |= {} if residual else {"residual_ptr": None}
    return compiled(_small_batch_kernel, constants, type_of, config.warps).metadata.shared

found = {
    "qkv": shared(small_batch_config(64, 5120, 2880, False, 132), False, False),
    "o": shared(small_batch_config(64, 2880, 4096, False, 132), False, True),
    "gate/up": shared(small_batch_config(64, 2816, 2048, True, 132), True, False),
}
for rows in (1, 32, 64, 128):
    found[f"router {rows}"] = shared(few_outputs_config(rows, 2880), False, False)
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    shared = run_script(SCRIPT, tmp_path)
    assert len(shared) == 7
    assert max(shared.values()) <= LARGEST_SHARED
    assert 2 * shared["qkv"] <= LARGEST_SHARED  # two programs at once
