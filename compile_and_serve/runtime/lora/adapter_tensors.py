"""`AdapterTensors`: the tensors of a safetensors file, read and never mapped, whose header is not trusted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import torch

from compile_and_serve.runtime.lora.bounded_file import BoundedFile
from compile_and_serve.runtime.lora.errors import AdapterError

_LENGTH = 8  # bytes, of the header's length
_BYTES_PER_TENSOR = 1024  # in the header; names and shapes take about 200
_LONGEST_NAME = 512  # characters
_MAX_DIMS = 8
_MOST_BYTES = 1 << 50  # larger numbers are nonsense
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Stored(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    begin: int


class AdapterTensors:
    """An open file of tensors. shapes: by name. stamp: differs when the file has changed.

    Construction and reading raise `AdapterError` with one sentence, and `OSError`.
    most_tensors: bounds the header. deadline: of reading, by `time.monotonic`.
    """

    def __init__(self, path: Path, most_tensors: int, deadline: float) -> None:
        self.path = path
        self._file = BoundedFile(path, deadline)
        try:
            self._stored = self._read_header(most_tensors)
        except BaseException:
            self._file.__exit__()
            raise
        self.shapes = {name: stored.shape for name, stored in self._stored.items()}
        self.stamp = self._file.stamp

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__()

    def read(self, name: str) -> torch.Tensor:
        """A tensor of floating-point numbers, in the file's dtype. Its shape may not have zeros."""
        dtype, shape, begin = self._stored[name]
        if dtype not in _DTYPES:
            raise AdapterError(f"{self.path} has {name} as {dtype:.20}, but adapters are floating-point numbers.")
        content = self._file.read(begin, math.prod(shape) * _DTYPES[dtype].itemsize)
        return torch.frombuffer(content, dtype=_DTYPES[dtype]).view(shape)

    def check_time(self) -> None:
        """Raise `AdapterError` after the deadline."""
        self._file.check_time()

    def check_unchanged(self) -> None:
        """Raise `AdapterError` if the file has changed since it was opened."""
        self._file.check_unchanged()

    def _read_header(self, most_tensors: int) -> dict[str, _Stored]:
        file, largest = self._file, _BYTES_PER_TENSOR * (most_tensors + 64)
        if file.size < _LENGTH:
            raise self._wrong("it is shorter than its header")
        length = int.from_bytes(file.read(0, _LENGTH), "little")
        if length > largest:
            raise self._wrong(f"its header would have {length} bytes, and {largest} are possible for this model")
        if length > file.size - _LENGTH:
            raise self._wrong("it is shorter than its header")
        try:
            raw = msgspec.json.decode(file.read(_LENGTH, length), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise self._wrong("its header is not a safetensors header") from None
        end, found = 0, {}
        for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
            begin, after = entry.data_offsets
            if begin != end or after < begin or not _is_shape(entry.shape) or len(name) > _LONGEST_NAME:
                raise self._wrong("its header is not a safetensors header")
            if entry.dtype in _DTYPES and after - begin != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
                raise self._wrong("its header is not a safetensors header")
            found[name] = _Stored(entry.dtype, tuple(entry.shape), _LENGTH + length + begin)
            end = after
        if _LENGTH + length + end != file.size:
            raise self._wrong(f"it has {file.size} bytes, and its header says {_LENGTH + length + end}")
        return found

    def _wrong(self, reason: str) -> AdapterError:
        return AdapterError(f"{self.path} is truncated or not a safetensors file: {reason}.")


def _is_shape(sizes: list[Any]) -> bool:
    return len(sizes) <= _MAX_DIMS and all(0 <= size < _MOST_BYTES for size in sizes)
