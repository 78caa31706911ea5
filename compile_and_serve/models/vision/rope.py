"""RoPE with positions of three rows, time, height and width (MRoPE, arXiv:2409.12191).

Shape legend: T tokens of the step, E head size, F = E / 2 frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import ArrayInfo
from compile_and_serve.models.config import DecoderConfig, ModelConfigError
from compile_and_serve.models.layers import inverse_frequencies, rope_magnitude
from compile_and_serve.models.vision.names import POSITION_ARRAY


def _fill(batch: TokenBatch) -> np.ndarray:
    return batch.with_rows_of(POSITION_ARRAY, np.tile(batch.positions, (3, 1)), axis=1, goes_on=True)


def positions_input(max_positions: int) -> StepInput:
    """`positions` int64 (3, "tokens"). Text behind an item goes on from the last row that the item gives."""
    return StepInput(
        name="positions",
        dtype=torch.int64,
        dims=(3, TOKENS),
        fill=_fill,
        advance="next",
        arrays=(ArrayInfo(name=POSITION_ARRAY, row_shape=(3,), limit=max_positions),),
    )


def row_of_frequency(sections: Sequence[int], *, interleaved: bool) -> torch.Tensor:
    """int64 [F]: which row of the positions turns each frequency.

    sections: frequencies of each row. They lie one behind the other (Qwen2-VL), or, interleaved, alternate as far as the rows for height
    and width have some left (Qwen3-VL).
    """
    if not interleaved:
        return torch.cat([torch.full((size,), row, dtype=torch.int64) for row, size in enumerate(sections)])
    rows_F = torch.zeros(sum(sections), dtype=torch.int64)
    for row in (1, 2):
        rows_F[row : 3 * sections[row] : 3] = row
    return rows_F


class ThreeRowRope(nn.Module):
    """As `RotaryEmbedding`, for positions of three rows."""

    inv_freq: torch.Tensor
    rows: torch.Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.magnitude = rope_magnitude(config.rope)
        for name, value in rope_buffers(config).items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, positions_3T: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [3, T]. → cos, sin: [T, E] in `dtype`, computed in float32. Their two halves are equal."""
        angles_TF = positions_3T[self.rows].t().to(torch.float32) * self.inv_freq
        angles_TE = torch.cat((angles_TF, angles_TF), dim=-1)
        cos_TE, sin_TE = angles_TE.cos(), angles_TE.sin()
        if self.magnitude != 1.0:
            cos_TE, sin_TE = cos_TE * self.magnitude, sin_TE * self.magnitude
        return cos_TE.to(dtype), sin_TE.to(dtype)


def rope_buffers(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """The values of the buffers of a `ThreeRowRope`. Raises `ModelConfigError`."""
    sections = config.rope.get("mrope_section")
    half = config.rope_size // 2
    if not isinstance(sections, Sequence) or len(sections) != 3 or sum(sections) != half:
        raise ModelConfigError(f"mrope_section in the model's config must be three numbers whose sum is {half}, got {sections!r}.")
    return {
        "inv_freq": inverse_frequencies(config.rope, config.rope_size),
        "rows": row_of_frequency(sections, interleaved=bool(config.rope.get("mrope_interleaved"))),
    }


def text_config(config: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """The config of the decoder in the config.json of a vision-language model, which may have it at its top.

    defaults: of the decoder's fields. The RoPE type "mrope" of older files is the default one.
    """
    own = config.get("text_config")
    text = dict(own) if isinstance(own, Mapping) else {name: value for name, value in config.items() if name != "vision_config"}
    if isinstance(own, Mapping) and config.get("tie_word_embeddings") is not None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    for name in ("rope_scaling", "rope_parameters"):
        rope = text.get(name)
        if isinstance(rope, Mapping):
            text[name] = {key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in rope.items()}
    return {**defaults, **text}
