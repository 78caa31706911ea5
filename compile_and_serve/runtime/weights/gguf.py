"""GGUF files as checkpoints: their tensors under Hugging Face's names.

Weights are dequantized by the package `gguf`, or keep the file's blocks where the model takes them (`models/quantization/gguf.py`).
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.gguf_architectures import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, UNUSED, Architecture
from compile_and_serve.runtime.weights.gguf_config import architecture_of
from compile_and_serve.runtime.weights.gguf_file import GgufFile, TensorInfo, read_gguf, short
from compile_and_serve.runtime.weights.gguf_tensors import (
    CHANGES,
    EXPERT,
    JOINS,
    OF_BLOCKS,
    PAIRED_HEADS,
    Heads,
    dequantized,
    heads_of,
    joined_shape,
    names_of,
    part_of,
    raw_bytes,
)

_READ_BY_THE_CONFIG = (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS)


class GgufCheckpoint:
    """A GGUF file's tensors in float32, or the tensors of all parts of a split one.

    packed: names of the tensors whose blocks are kept, as uint8 [rows, bytes].
    """

    def __init__(self, path: Path, packed: frozenset[str] = frozenset()) -> None:
        file = read_gguf(path)
        row = architecture_of(file) if "general.architecture" in file.metadata else Architecture(model="", model_type="")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._readers: dict[str, Callable[[], torch.Tensor]] = {}
        joined = {part for _, parts in row.joined.values() for part in parts}
        heads = heads_of(file)
        for name, info in file.tensors.items():
            part = part_of(name)
            if name in _READ_BY_THE_CONFIG or part.startswith(UNUSED) or f"{part}.{name.rpartition('.')[2]}" in joined:
                continue
            self._add(info, names_of(name, row), row.changes.get(part), heads, packed)
        for block in sorted({name.split(".")[1] for name in file.tensors if name.startswith("blk.")}, key=_number):
            for target, (function, parts) in row.joined.items():
                self._join(file, block, f"{row.layers}.{block}.{target}", function, parts)

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        jobs = ((name, read) for name, read in self._readers.items() if name in names)
        yield from _run_ahead(jobs, num_threads=min(8, os.cpu_count() or 1))

    def _add(self, info: TensorInfo, names: tuple[str, ...], change: str | None, heads: Heads, packed: frozenset[str]) -> None:
        """Add a tensor under one name, a stacked one under the names of its experts, or a fused one under several."""
        if change is not None and change in PAIRED_HEADS:
            count = PAIRED_HEADS[change](heads)
            if count < 1 or info.shape[0] % (2 * count):
                raise WeightError(
                    f"{info.path} is damaged: {info.name} has {info.shape[0]} rows for {short(count)} heads; download it again."
                )
        if len(names) > 1:
            size = info.shape[0] // (heads.query + 2 * heads.key)
            rows = [heads.query * size, heads.key * size, heads.key * size]
            for number, name in enumerate(names):
                is_packed = name in packed
                self.shapes[name] = (rows[number], *(_packed_shape(info) if is_packed else info.shape)[1:])
                self._readers[name] = partial(_rows, info, sum(rows[:number]), rows[number], is_packed)
        elif EXPERT in names[0]:
            for expert in range(info.shape[0]):
                name = names[0].replace(EXPERT, str(expert))
                is_packed = name in packed
                self.shapes[name] = (info.shape[1], _row_bytes(info)) if is_packed else info.shape[1:]
                self._readers[name] = partial(_expert, info, expert, is_packed)
        else:
            is_packed = names[0] in packed
            shape = _packed_shape(info) if is_packed else info.shape
            self.shapes[names[0]] = (1, *shape) if change == "one_row" else shape
            self._readers[names[0]] = partial(_read, info, is_packed, change, heads)

    def _join(self, file: GgufFile, block: str, target: str, function: str, parts: tuple[str, ...]) -> None:
        infos = [file.tensors[name] for part in parts if (name := f"blk.{block}.{part}") in file.tensors]
        if len(infos) == len(parts):
            self.shapes[target] = joined_shape(function, [info.shape for info in infos])
            self._readers[target] = partial(_joined, function, infos)


def _number(block: str) -> int:
    return int(block) if block.isdecimal() else -1


def _packed_shape(info: TensorInfo) -> tuple[int, ...]:
    return info.shape[0], _row_bytes(info)


def _row_bytes(info: TensorInfo) -> int:
    return info.num_bytes // math.prod(info.shape[:-1])


def _read(info: TensorInfo, is_packed: bool, change: str | None, heads: Heads) -> torch.Tensor:
    tensor = torch.from_numpy(raw_bytes(info)).view(_packed_shape(info)) if is_packed else torch.from_numpy(dequantized(info))
    return tensor if change is None else CHANGES[change](tensor, heads)


def _rows(info: TensorInfo, first: int, count: int, is_packed: bool) -> torch.Tensor:
    if is_packed:
        return torch.from_numpy(raw_bytes(info, first, count, info.shape[0])).view(count, -1)
    return torch.from_numpy(dequantized(info, first, count, info.shape[0]))


def _expert(info: TensorInfo, expert: int, is_packed: bool) -> torch.Tensor:
    if is_packed:
        return torch.from_numpy(raw_bytes(info, expert, 1, info.shape[0])).view(info.shape[1], -1)
    return torch.from_numpy(dequantized(info, expert, 1, info.shape[0])[0])


def _joined(function: str, infos: list[TensorInfo]) -> torch.Tensor:
    if function in OF_BLOCKS:
        return JOINS[function](*(torch.from_numpy(raw_bytes(info)).view(*info.shape[:-1], -1) for info in infos))
    return JOINS[function](*(torch.from_numpy(dequantized(info)) for info in infos))


def _run_ahead(jobs: Iterator[tuple[str, Callable[[], torch.Tensor]]], *, num_threads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Results in order, computed by threads at most `num_threads` + 1 ahead, so that few tensors are in memory."""
    pending: deque[tuple[str, Future[torch.Tensor]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="dequantize") as pool:
        for name, job in jobs:
            pending.append((name, pool.submit(job)))
            if len(pending) > num_threads:
                ready, future = pending.popleft()
                yield ready, future.result()
        while pending:
            ready, future = pending.popleft()
            yield ready, future.result()
