"""Which of several kernels of a linear is the fastest on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.tuning.timer import call_seconds
from compile_and_serve.custom_ops.tuning.tuner import Problem, is_tuning_on, tuner_of

Kernel = Callable[[torch.Tensor], object]  # a function of the weight

_MAX_COPIES = 16
_MAX_COLD_TOKENS = 256  # with more, a weight is read so often that its first read does not matter
_MIN_CALLS, _ROUNDS = 4, 3
_LONG_CALL_SECONDS = 1e-3  # a shorter call is timed in a graph: launching it may take longer than it runs


def fastest_kernel(
    problem: Problem, kernels: Mapping[str, Kernel], weight: torch.Tensor, *, min_tokens: int = 1, max_tokens: int = 1
) -> str:
    """The name of the fastest kernel, measured once for each problem and range of token counts.

    kernels: the first is the default if there is no measurement and none can be made: on other devices, in `compile_ahead`, in
    `tuning_off` and during a graph capture, when nothing may wait for the device. min_tokens, max_tokens: as in `Tuner.fastest`.
    """
    platform = platform_of(weight.device)
    if not platform.runs_triton_kernels:
        return next(iter(kernels))
    tuner = tuner_of(weight.device)
    if is_compiling_ahead() and is_tuning_on() and tuner.kept(problem) is None:
        _compile_all(kernels, weight)
    if is_compiling_ahead() or not is_tuning_on() or platform.is_capturing():
        return tuner.fastest(problem, kernels, None, min_tokens=min_tokens, max_tokens=max_tokens)
    assert problem.num_tokens is not None
    timer = _WeightTimer(weight, is_cold=problem.num_tokens <= _MAX_COLD_TOKENS)
    name = tuner.fastest(problem, kernels, timer.seconds, min_tokens=min_tokens, max_tokens=max_tokens)
    timer.free_memory()
    return name


def _compile_all(kernels: Mapping[str, Kernel], weight: torch.Tensor) -> None:
    for kernel in kernels.values():
        with suppress(Exception):  # by torch, Triton or CUTLASS: the tuner will log it
            kernel(weight)


class _WeightTimer:
    """Times kernels that read one weight. is_cold: each call reads the weight from memory, as in a step over many layers."""

    def __init__(self, weight: torch.Tensor, *, is_cold: bool) -> None:
        self._weight, self._is_cold = weight, is_cold
        self._copies: list[torch.Tensor] = []

    def seconds(self, kernel: Kernel) -> float:
        """Device seconds of one call; the minimum of several rounds."""
        if not self._copies:
            self._copies = self._make_copies()
        copies = self._copies
        rounds = call_seconds(
            [lambda number: kernel(copies[number % len(copies)])],
            self._weight.device,
            num_calls=max(_MIN_CALLS, len(copies)),
            num_rounds=_ROUNDS,
            long_call_seconds=_LONG_CALL_SECONDS,
        )
        return min(rounds[0])

    def free_memory(self) -> None:
        """Free the memory that measuring used. The engine relies on it when it sizes the KV cache."""
        if self._copies:
            self._copies = []
            platform_of(self._weight.device).release_cached()

    def _make_copies(self) -> list[torch.Tensor]:
        if not self._is_cold:
            return [self._weight]
        l2_bytes = platform_of(self._weight.device).l2_bytes
        others = -(-2 * l2_bytes // (self._weight.numel() * self._weight.element_size()))
        return [self._weight, *(self._weight.clone() for _ in range(min(others, _MAX_COPIES - 1)))]
