"""Measures our packed linears against oneDNN's product over the plain weight, on this CPU, once for each shape.

Our kernels are built for the vector units. oneDNN also knows matrix units (AMX), with which its product of many tokens is several times as
fast; with a few tokens, and on other CPUs, the fused kernels over packed weights win. The choice is a constant of the compiled graph, so
that an artifact holds it. The times are kept in the tuner's store, under the CPU, its number of threads and our kernels' sources. Each is
the least of many, because a start has other work beside the measurement, and that only adds time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from compile_and_serve.compiler.rewrite.library_choice import SIZES, LibraryChoice, LinearShape
from compile_and_serve.custom_ops.linear.fused_linear import fused_linear, pack_linear_weight
from compile_and_serve.custom_ops.tuning.timer import call_seconds
from compile_and_serve.custom_ops.tuning.tuner import Measurement, Problem, Tuner, device_name

log = logging.getLogger(__name__)

OURS, LIBRARY = "ours", "onednn"
ROUNDS = 9
MIN_WEIGHTS = 1 << 17  # of a linear that is measured
# Of a weight that is measured: the rate of a product hardly depends on the features beyond these, and a large model's would take seconds.
MAX_OUTPUTS, MAX_INPUTS = 1024, 4096


class CpuLibraryTuner:
    """The `LibraryTuner` of one compilation. folders: of the tuner's store."""

    def __init__(self, device: torch.device, folders: Sequence[Path]) -> None:
        self._device = device
        self._tuner = Tuner(device_name(device), folders)
        self._chosen: dict[LinearShape, LibraryChoice] = {}

    def choose(self, shape: LinearShape) -> LibraryChoice | None:
        """As `LibraryTuner.choose`."""
        if shape.out_features * shape.in_features < MIN_WEIGHTS:
            return None
        if shape not in self._chosen:
            self._chosen[shape] = choice = self._measured(shape)
            log.info("Linear %s", choice.sentence())
        return self._chosen[shape]

    def _measured(self, shape: LinearShape) -> LibraryChoice:
        name = f"{shape} at {SIZES} tokens, up to [{MAX_OUTPUTS}, {MAX_INPUTS}]"
        problem = Problem(kind="library_linear", name=name)
        try:
            kept = self._tuner.measure(problem, (OURS, LIBRARY), lambda: self._measure(shape))
            assert kept is not None
            return LibraryChoice(shape=shape, ours=tuple(kept.seconds[OURS]), library=tuple(kept.seconds[LIBRARY]))
        except Exception as error:  # of torch or oneDNN: a measurement is no reason not to serve
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log.warning("%s could not be measured with oneDNN: %s", shape, reason)
            return LibraryChoice(shape=shape, failure=reason)

    def _measure(self, shape: LinearShape) -> Measurement:
        outputs, inputs = min(shape.out_features, MAX_OUTPUTS), min(shape.in_features, MAX_INPUTS)
        # The global generator's numbers must not depend on measurements.
        generator = torch.Generator(self._device).manual_seed(0)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator, device=self._device).to(shape.dtype)

        weight_OI = random(outputs, inputs)
        packed = pack_linear_weight(weight_OI)
        norm_I = random(inputs) if shape.has_norm else None
        bias_O = random(outputs) if shape.has_bias else None
        columns = outputs // 2 if shape.silu_mul else outputs
        seconds: dict[str, list[float]] = {OURS: [], LIBRARY: []}
        for num_tokens in SIZES:
            x_TI = random(num_tokens, inputs)
            residual_TO = random(num_tokens, columns) if shape.has_residual else None
            ours = partial(
                fused_linear, x_TI, packed, outputs, norm_I, bias_O=bias_O, silu_mul=shape.silu_mul, residual_TO=residual_TO
            )  # fmt: skip
            library = partial(ours, plain_OI=weight_OI, min_plain_tokens=1)
            calls = [lambda _, run=run: run() for run in (ours, library)]
            our_times, library_times = call_seconds(calls, self._device, num_calls=1, num_rounds=ROUNDS)
            seconds[OURS].append(min(our_times))
            seconds[LIBRARY].append(min(library_times))
        return Measurement(seconds=seconds)
