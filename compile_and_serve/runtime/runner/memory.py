"""Where a CUDA device's memory goes, measured before the KV cache is sized; and one sentence when it is not enough."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.runner.state_memory import GIB

# What to change when memory runs out while …
LOADING = "use smaller or quantized weights (--quantization fp8), or more devices (--tensor-parallel-size)"
LARGEST_STEP = "lower --max-num-batched-tokens or --max-num-seqs"
KV_CACHE = "lower --gpu-memory-utilization, --kv-cache-memory or --max-model-len"
WARMING_UP = (
    "lower --gpu-memory-utilization or --kv-cache-memory, which leaves less to the KV cache, or --max-num-batched-tokens or "
    "--max-num-seqs, which makes steps smaller"
)


class DeviceMemoryError(ValueError):
    """The device's memory is not enough for the options; the message says what was being done and what to lower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes of one CUDA device before its KV cache is allocated.

    total: of the device, of which the engine keeps within `utilization` (0–1), all else included. others: held by other processes, and
    by the driver for this one. weights: what is allocated once they are loaded. largest_step: what a step of `step_tokens` tokens takes
    beyond them, measured by running one. sampling: of float32 copies of the logits. graphs: what CUDA graphs will take, estimated.
    encoder_rows: the region for rows of an encoder.
    """

    total: int
    utilization: float
    others: int
    weights: int
    largest_step: int
    step_tokens: int
    sampling: int
    graphs: int
    encoder_rows: int = 0

    @property
    def free_for_cache(self) -> int:
        """What is left for the KV cache; negative where there is not even room for the rest."""
        needs = self.others + self.weights + self.largest_step + self.sampling + self.graphs + self.encoder_rows
        return int(self.total * self.utilization) - needs

    def table(self, device: str, cache_bytes: int, cache_tokens: int) -> str:
        """Lines to read: who takes how much."""
        rows = [
            ("other processes", self.others, "and the driver"),
            ("weights", self.weights, ""),
            ("largest step", self.largest_step, f"{self.step_tokens} tokens"),
            ("sampling", self.sampling, ""),
            ("CUDA graphs", self.graphs, "estimated"),
            *([("encoder rows", self.encoder_rows, "")] if self.encoder_rows else []),
            ("KV cache", cache_bytes, f"{cache_tokens} tokens"),
            ("left", self.free_for_cache - cache_bytes, ""),
        ]
        lines = [f"Memory of {device}: {_gib(self.total)}, of which {self.utilization:.0%} may be used"]
        lines += [f"  {name:<16} {_gib(count):>11}  {note}".rstrip() for name, count, note in rows]
        return "\n".join(lines)


@contextmanager
def memory_for(doing: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turn running out of memory inside the block into `DeviceMemoryError`: one sentence that ends with the advice."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise DeviceMemoryError(_sentence(doing, device, advice, str(error))) from error


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)  # CUDA's own error, outside torch's allocator; and the CPU allocator's
    return "out of memory" in text or "can't allocate memory" in text


def _sentence(doing: str, device: torch.device, advice: str, text: str) -> str:
    asked = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", text)
    wanted = f"{asked[1]} more were wanted, " if asked else ""
    platform = platform_of(device)
    free, total, reserved = platform.memory()
    if platform.shares_host_memory:
        return f"Memory ran out while {doing}: {wanted}{_gib(free)} are free; {advice}."
    others = max(0, total - free - reserved)
    return (
        f"{device.type.upper()} ran out of memory while {doing}: {wanted}{_gib(free)} of {_gib(total)} are free, "
        f"{_gib(reserved)} are held here and {_gib(others)} by other processes and the driver; {advice}."
    )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
