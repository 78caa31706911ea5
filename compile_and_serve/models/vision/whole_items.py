"""Media items that a class of the transformers package encodes one by one: its processor's tensors, as one array of the item.

Pixels cross processes as bytes where the processor's normalization is the usual one; the encoder's side then does it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from compile_and_serve.custom_ops.step import TOKENS, StepInput
from compile_and_serve.custom_ops.step_data import ArrayInfo, StepArray

PROCESSED = ArrayInfo(name="processed", is_whole=True)
PROCESSED_INPUT = StepInput(
    name=PROCESSED.name,
    dtype=torch.uint8,
    dims=(TOKENS,),
    fill=lambda batch: np.zeros(len(batch.token_ids), dtype=np.uint8),
    arrays=(PROCESSED,),
)
_MEAN, _STD = "pixel mean", "pixel std"  # float32 [channels], beside pixels that are bytes


class _Tensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def packed(tensors: Mapping[str, np.ndarray], *, mean: np.ndarray | None = None, std: np.ndarray | None = None) -> StepArray:
    """One row with all tensors of an item. mean, std: of the channels; None: no tensor has bytes that are to be normalized."""
    every = {**tensors, **({} if mean is None or std is None else {_MEAN: mean, _STD: std})}
    parts = {name: _Tensor(str(one.dtype), one.shape, np.ascontiguousarray(one).tobytes()) for name, one in every.items()}
    data = msgspec.msgpack.encode(parts)
    return StepArray(dtype="uint8", row_shape=(len(data),), data=memoryview(data))


def joined(arrays: Sequence[StepArray]) -> StepArray:
    """One item of several, whose tensors lie one behind the other in their first dimension."""
    parts = [msgspec.msgpack.decode(one.data, type=dict[str, _Tensor]) for one in arrays]
    values = {
        name: np.concatenate([np.frombuffer(one[name].data, one[name].dtype).reshape(one[name].shape) for one in parts])
        for name in parts[0].keys() - {_MEAN, _STD}
    }
    moments = [np.frombuffer(parts[0][name].data, parts[0][name].dtype) if name in parts[0] else None for name in (_MEAN, _STD)]
    return packed(values, mean=moments[0], std=moments[1])


def unpacked(array: StepArray, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of an item on the device; bytes are normalized to float32."""
    parts = msgspec.msgpack.decode(array.data, type=dict[str, _Tensor])
    tensors = {
        name: torch.from_numpy(np.frombuffer(one.data, dtype=one.dtype).reshape(one.shape).copy()).to(device) for name, one in parts.items()
    }
    mean, std = tensors.pop(_MEAN, None), tensors.pop(_STD, None)
    if mean is None or std is None:
        return tensors
    return {name: normalized(one, mean, std) if one.dtype == torch.uint8 else one for name, one in tensors.items()}


def normalized(pixels: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor) -> torch.Tensor:
    """float32, of the same shape. pixels: uint8 [..., C, height, width], or flat patches [N, C · values]."""
    channels, values = len(mean_C), pixels.to(torch.float32) * (1 / 255)
    if pixels.dim() >= 3 and pixels.shape[-3] == channels:
        return (values - mean_C[:, None, None]) / std_C[:, None, None]
    repeat = pixels.shape[-1] // channels
    return (values - mean_C.repeat_interleave(repeat)) / std_C.repeat_interleave(repeat)
