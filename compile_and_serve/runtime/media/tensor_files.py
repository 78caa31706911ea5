"""Tensors that come as files: what `torch.save` writes, or safetensors. torch is imported for the first kind alone.

Files come from outside, so nothing but a plain tensor is taken, and none that is larger than its file.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any, get_args

import numpy as np

from compile_and_serve.custom_ops.step_data import ArrayDtype, StepArray
from compile_and_serve.runtime.media.prepared import MediaError

_DTYPES: dict[str, ArrayDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}


def tensor_of_file(data: bytes, name: str) -> StepArray:
    """The one tensor of a file; a leading dimension of 1 of three is left out. name: for errors. Raises `MediaError`."""
    try:
        array = _of_torch(data) if data[:2] == b"PK" else _of_safetensors(data)
    except MediaError as error:
        raise MediaError(f"{name} {error}") from None
    except Exception:  # of damaged files, of any kind
        raise MediaError(f"{name} is no file of torch.save or safetensors that can be read.") from None
    if "float" in array.dtype and not np.isfinite(array.rows(0, array.end)).all():
        raise MediaError(f"{name} has values that are no finite numbers.")
    return array


def _of_torch(data: bytes) -> StepArray:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(one.compress_type != zipfile.ZIP_STORED for one in entries) or sum(one.file_size for one in entries) > len(data):
            raise MediaError("is a compressed file: give it as torch.save writes it.")
    import torch

    found: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or found.is_quantized or found.is_meta:
        raise MediaError(f"must be one plain tensor, got a {type(found).__name__}.")
    if found.numel() * found.element_size() > len(data):
        raise MediaError("has a tensor whose elements share memory: save a contiguous one.")
    found = found.detach()
    _check_dtype(str(found.dtype).removeprefix("torch."))
    return StepArray.of((found[0] if found.dim() == 3 and len(found) == 1 else found).contiguous())


def _of_safetensors(data: bytes) -> StepArray:
    from safetensors import deserialize

    found = deserialize(data)
    if len(found) != 1:
        raise MediaError(f"must be a file of one tensor, got {len(found)}.")
    [(_, parts)] = found
    dtype = _DTYPES.get(parts["dtype"])
    _check_dtype(dtype or parts["dtype"])
    assert dtype is not None
    shape = tuple(parts["shape"])
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    return StepArray(dtype=dtype, row_shape=shape[1:], data=memoryview(bytes(parts["data"])))


def _check_dtype(dtype: str) -> None:
    if dtype not in get_args(ArrayDtype):
        raise MediaError(f"must be a tensor of float32, float16, bfloat16 or integers, got {dtype}.")
