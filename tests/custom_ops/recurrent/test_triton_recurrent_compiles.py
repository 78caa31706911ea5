"""The kernels of recurrent ops compile for a Hopper GPU (none is needed), for the heads of Qwen3.5, Kimi-Linear and Nemotron-H."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.recurrent.triton_linear_attention import _linear_attention_kernel
from compile_and_serve.custom_ops.recurrent.triton_short_convolution import _ring_kernel, _sums_kernel
from tests.support.hopper import compiled

INT32 = {"start_loc_ptr", "seq_lens_ptr", "read_ptr", "write_ptr"}
FLOATS = {"decay_ptr", "beta_ptr", "initial_ptr", "checkpoint_ptr", "values_ptr", "decays_ptr"}

def type_of(name):
    if not name.endswith("_ptr"):
        return "i32"
    return "*i32" if name in INT32 or name.endswith("columns_ptr") else "*fp32" if name in FLOATS else "*bf16"

found = {}
UNITS = {"CHECKPOINT_UNITS": 4, "KEY_UNITS": 8, "VALUE_UNITS": 8, "DECAY_UNITS": 32}
for name, sizes in {
    "delta": {"NUM_HEADS": 32, "GROUP": 2, "K": 128, "V": 128, "PER_CHANNEL": False, "HAS_BETA": True},
    "kda": {"NUM_HEADS": 32, "GROUP": 1, "K": 128, "V": 128, "PER_CHANNEL": True, "HAS_BETA": True},
    "ssd": {"NUM_HEADS": 128, "GROUP": 16, "K": 128, "V": 80, "PER_CHANNEL": False, "HAS_BETA": False},
}.items():
    for part in range(4):
        constants = UNITS | sizes | {"RING": 48, "BLOCK_K": 128, "BLOCK_C": 32, "PART": part}
        constants |= {} if part == 3 else {"initial_ptr": None}
        constants |= {} if sizes["HAS_BETA"] else {"beta_ptr": None}
        kernel = compiled(_linear_attention_kernel, constants, type_of, 4)
        found[f"{name} {part}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
sizes = {"D": 8192, "RING": 18, "UNITS": 8, "CHANNELS": 128, "BLOCK_C": 256}
for tokens in (1, 32):
    kernel = compiled(_sums_kernel, sizes | {"W": 4, "HAS_BIAS": True, "TOKENS": tokens}, type_of, 4)
    found[f"sums {tokens}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
kernel = compiled(_ring_kernel, sizes | {"BLOCK_R": 32}, type_of, 4)
found["ring"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
print(json.dumps(found))
"""


def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    found = run_script(SCRIPT, tmp_path)
    assert len(found) == 15
    for name, facts in found.items():
        assert facts["shared"] <= LARGEST_SHARED, name
        assert not facts["spills"], name
