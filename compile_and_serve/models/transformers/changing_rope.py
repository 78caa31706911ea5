"""RoPE whose frequencies follow the sequence's length: LongRoPE (arXiv:2402.13753) and dynamic NTK.

A token is rotated as of the length that its sequence had when the token was computed: that of the prompt, or, of a token behind the prompt,
its position plus 1 (`ROPE_LENGTH`). Keys in the cache stay as they are. So does transformers' `generate`, which computes a prompt at once
and every later token by itself. Classes of Phi compute all keys again when a sequence outgrows LongRoPE's original length, and so does the
scheduler then (`LengthRegimes.recompute`).

Shape legend: T tokens of the step, E dimensions that RoPE rotates.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import ROPE_LENGTH_DATUM, LengthRegimes
from compile_and_serve.models.transformers.attention import Unsupported


def _lengths(batch: TokenBatch) -> np.ndarray:
    return np.maximum(batch.data_of_token(ROPE_LENGTH_DATUM, 0), batch.positions + 1)


ROPE_LENGTH = StepInput(name="rope_length", dtype=torch.int64, dims=(TOKENS,), fill=_lengths, advance="next")


class _LongRope(nn.Module):
    """The short frequencies up to the original length, the long ones beyond. Either have a factor of cos and sin."""

    short: torch.Tensor
    long: torch.Tensor

    def __init__(self, rope: Any, parameters: dict[str, Any], limit: int) -> None:
        super().__init__()
        self.limit = limit
        size = rope.inv_freq.shape[0]
        powers = parameters["rope_theta"] ** (torch.arange(0, 2 * size, 2, dtype=torch.int64).float() / (2 * size))
        for name in ("short", "long"):
            self.register_buffer(name, 1.0 / (torch.tensor(parameters[f"{name}_factor"], dtype=torch.float32) * powers), persistent=False)
        # What the class multiplies by is its cos at position 0.
        self.magnitudes = tuple(_reference(rope, length)[0][0, 0].item() for length in (limit, limit + 1))

    def forward(self, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """→ inverse frequencies [T, E/2], factor"""
        is_long = (lengths_T > self.limit)[:, None]
        short, long = self.magnitudes
        factor = short if short == long else torch.where(is_long, long, short)
        return torch.where(is_long, self.long, self.short), factor


class _DynamicRope(nn.Module):
    """The base grows with the length beyond that of the training."""

    exponents: torch.Tensor

    def __init__(self, rope: Any, parameters: dict[str, Any], limit: int) -> None:
        super().__init__()
        self.limit, self.base, self.scaling = limit, float(parameters["rope_theta"]), float(parameters["factor"])
        self.size = 2 * rope.inv_freq.shape[0]
        exponents = torch.arange(0, self.size, 2, dtype=torch.int64).float() / self.size
        self.register_buffer("exponents", exponents, persistent=False)

    def forward(self, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """→ inverse frequencies [T, E/2], factor"""
        growth = self.scaling * lengths_T.clamp(min=self.limit) / self.limit - (self.scaling - 1)
        bases = self.base * growth ** (self.size / (self.size - 2))
        return 1.0 / (bases[:, None] ** self.exponents), 1.0


def follow_lengths(model: Any) -> tuple[LengthRegimes | None, dict[str, torch.Tensor]]:
    """Let RoPE modules of the types "longrope" and "dynamic" read `RunningForward.rope_lengths`.

    → regimes, and the values of the buffers that the modules get. None, {}: there are no such modules. Raises `Unsupported` for modules
    that rotate in another way.
    """
    regimes: LengthRegimes | None = None
    buffers: dict[str, torch.Tensor] = {}
    for name, rope in list(model.named_modules()):
        kind = getattr(rope, "rope_type", None)
        if kind not in ("longrope", "dynamic"):
            continue
        parameters = rope.config.rope_parameters
        limit = int(parameters["original_max_position_embeddings"] if kind == "longrope" else rope.config.max_position_embeddings)
        again = kind == "longrope" and _computes_again(model)
        found = LengthRegimes(limit=limit, by_length=kind == "dynamic", recompute=again)
        if regimes not in (None, found):
            raise Unsupported("its layers have RoPE with several original lengths")
        regimes = found
        frequencies = _checked(rope, (_LongRope if kind == "longrope" else _DynamicRope), parameters, limit)
        buffers |= {f"{name}.cas_frequencies.{leaf}": value for leaf, value in frequencies.named_buffers()}
        rope.cas_frequencies = frequencies.to("meta")
        rope.forward = partial(_rotation, rope)
        rope.rope_type = "default"  # nothing may change its own frequencies, which are not used
    return regimes, buffers


def _computes_again(model: Any) -> bool:
    """Whether the class's `generate` drops the cache of a sequence that outgrows the original length."""
    code = getattr(inspect.unwrap(type(model).prepare_inputs_for_generation), "__code__", None)
    return code is not None and "original_max_position_embeddings" in code.co_consts


def _rotation(rope: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces a RoPE module's `forward`. → cos, sin: [1, T, E], their two halves are equal"""
    cos_TE, sin_TE = _cos_sin(rope.cas_frequencies, position_ids[0], rope.cas_running.rope_lengths)
    return cos_TE[None].to(x.dtype), sin_TE[None].to(x.dtype)


def _cos_sin(frequencies: nn.Module, positions_T: torch.Tensor, lengths_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inverse, factor = frequencies(lengths_T)
    angles = positions_T[:, None].float() * inverse
    angles_TE = torch.cat((angles, angles), dim=-1)
    return angles_TE.cos() * factor, angles_TE.sin() * factor


def _reference(rope: Any, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [2, E] of the first and the last position of so many tokens, by the class itself."""
    fresh = type(rope)(rope.config)
    cos, sin = fresh(torch.zeros(1), torch.tensor([[0, length - 1]]))
    return cos[0], sin[0]


def _checked(rope: Any, kind: type[_LongRope | _DynamicRope], parameters: dict[str, Any], limit: int) -> nn.Module:
    """The frequencies of a RoPE module. Raises `Unsupported` if they would not rotate as the module does."""
    try:
        frequencies = kind(rope, parameters, limit)
        for length in (limit, limit + 1, 2 * limit):
            positions, lengths = torch.tensor([0, length - 1]), torch.tensor([length, length])
            for found, expected in zip(_cos_sin(frequencies, positions, lengths), _reference(rope, length), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    except Exception as error:  # raised by the class's own code, or by the comparison
        reason = f"{type(rope).__name__} does not rotate by RoPE type {rope.rope_type!r} as other classes do"
        raise Unsupported(reason) from error
    return frequencies
