"""Random weights for a config without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch

from compile_and_serve.compiler.weights.transforms import TensorSpec
from compile_and_serve.custom_ops.quantization import LARGEST, GroupedWeight, Mxfp4Weight, QuantizedWeight, StoredWeight
from compile_and_serve.custom_ops.quantized.group_formats import QUANT_STATE, padded_state
from compile_and_serve.custom_ops.quantized.group_layout import TABLES

_FLOAT8_SCALE = 64.0  # of a group in NVFP4
_SPREAD_OF_E2M1 = 2.93  # standard deviation of random codes of MXFP4


def dummy_tensors(
    specs: Mapping[str, TensorSpec], *, device: torch.device, seed: int, std: float, quantized: Mapping[str, StoredWeight] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of every spec: N(0, std²), except that norm weights are 1 and biases 0.

    A tensor depends only on its name, its spec, the seed and the type of device. quantized: weight name → how a quantized
    checkpoint would store it.
    """
    scales: dict[str, float] = {}
    constants: dict[str, float] = {}
    mxfp4_scales, mxfp4_codes = set[str](), set[str]()
    group_sizes: dict[str, int] = {}  # by the name of the tensor with each input's group
    for stored in (quantized or {}).values():
        if isinstance(stored, GroupedWeight):  # the codes are random bits
            if stored.input_groups is not None:
                group_sizes[stored.input_groups] = stored.group_size
            if stored.table:
                mxfp4_codes.add(stored.tensors[0][0])
                constants |= _table_constants(stored, std)
                continue
            scales |= {tensor: _spread_of_bits(stored.bits) for tensor, _, dtype in stored.tensors if dtype.is_floating_point}
        elif isinstance(stored, Mxfp4Weight):
            mxfp4_scales.add(stored.tensors[1][0])
            mxfp4_codes.add(stored.tensors[0][0])
        elif isinstance(stored, QuantizedWeight):
            scales[stored.scale] = _spread(stored.dtype) / (127 if stored.scale_function == "scb_to_rows" else 1)
    for name, spec in specs.items():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        if QUANT_STATE in name:
            tensor.copy_(padded_state(b'{"nested_offset": 0.0}'))
        elif name in constants:
            tensor.fill_(constants[name])
        elif name in group_sizes:
            tensor.copy_(torch.arange(spec.shape[0], device=device) // group_sizes[name])
        elif name in mxfp4_scales:
            tensor.fill_(round(math.log2(std / _SPREAD_OF_E2M1)) + 127)
        elif name in mxfp4_codes:
            tensor.random_(0, 256, generator=_generator(name, seed, device))
        elif spec.dtype in (torch.int32, torch.uint8):
            limits = torch.iinfo(spec.dtype)
            # GGUF's blocks have float16 scales among their bytes.
            largest = 0x20 if spec.dtype == torch.uint8 else limits.max
            tensor.random_(limits.min, largest, generator=_generator(name, seed, device))
        elif name in scales:
            tensor.fill_(std / scales[name])
        elif spec.dtype in LARGEST:
            values = torch.empty(spec.shape, dtype=torch.float32, device=device)
            values.normal_(0.0, _spread(spec.dtype), generator=_generator(name, seed, device))
            tensor.copy_(values.clamp_(-LARGEST[spec.dtype], LARGEST[spec.dtype]))
        elif name.endswith("bias"):
            tensor.zero_()
        elif len(spec.shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, std, generator=_generator(name, seed, device))
        yield name, tensor


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)


def _table_constants(stored: GroupedWeight, std: float) -> dict[str, float]:
    """The values of the scales of a weight whose codes are indices of a table, by the tensor's name."""
    values = TABLES[stored.table]
    scale = std / math.sqrt(sum(value * value for value in values) / len(values))
    found = {}
    for name, _, dtype in stored.tensors[1:]:
        match name.rpartition(".")[2]:
            case "weight_scale" if dtype == torch.uint8:
                found[name] = float(round(math.log2(scale)) + 127)
            case "weight_scale":
                found[name] = _FLOAT8_SCALE
            case "weight_scale_2":
                found[name] = scale / _FLOAT8_SCALE
            case "weight_global_scale":
                found[name] = _FLOAT8_SCALE / scale
            case "nested_quant_map":
                found[name] = 1.0
            case "absmax" if dtype == torch.uint8:
                found[name] = 0.0
            case "absmax" | "nested_absmax":
                found[name] = scale
    return found


def _spread(dtype: torch.dtype) -> float:
    """Standard deviation of quantized values: a quarter of the largest value."""
    return LARGEST[dtype] / 4


def _spread_of_bits(bits: int) -> float:
    """Standard deviation of the difference of two random codes: a code and its zero point."""
    return float(((1 << 2 * bits) - 1) / 6) ** 0.5
