"""`DraftSampling`: draws drafts from the drafter's distribution, with the random numbers of the target's own draws.

Shape legend: S sequences, V vocabulary of the drafts, W of the target, R batch slots.

The target samples the token of a position with random numbers that depend on the request's seed and that position alone. A draft of the
same position is drawn from the drafter's distribution with the same numbers, temperature and filters. The closer the two distributions are,
the more often both draws are one token: always, where they are equal. So a request with a temperature accepts more than it does of the
likeliest tokens, and still gets the very tokens that it gets without drafts. (Rejection sampling with min(1, p / q) and max(0, p - q)
accepts a little more, but for the same seed it gives other tokens than without drafts.)

- With Gumbel noise (GPU), draws of p and q agree with probability ≥ (1 - d) / (1 + d), where d is their distance in total variation.
- With one uniform number that goes through the cumulative distribution (CPU), they agree where the intervals of a token overlap. A draft
  is the token whose interval has the largest share of a small window around the number, because the target's intervals are shifted a
  little.
"""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.staged_arrays import StagedArrays
from compile_and_serve.runtime.sampling.ops import (
    SAMPLING_FIELDS,
    argmax_rows,
    sample_rows,
    sample_top_k,
    sample_top_p,
    stream_key,
    uniforms,
)
from compile_and_serve.runtime.sampling_params import SamplingParams

WINDOW = 0.05  # half of it: about how far the intervals of a real head's distribution are shifted
_PROMPT_LENGTHS = "prompt_lengths"


class DraftSampling:
    """`add` each request, then `draw`. Rows of greedy requests, and of padding (slot R), get their likeliest token."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        """vocab_size: of the target."""
        self._vocab_size, self._shares_memory = vocab_size, platform_of(device).shares_host_memory
        fields: dict[str, type[np.generic]] = {**SAMPLING_FIELDS, _PROMPT_LENGTHS: np.int64}
        del fields["sample_positions"]
        self._values = {name: np.zeros(num_slots + 1, dtype=kind) for name, kind in fields.items()}
        self._staged = StagedArrays({name: (kind, num_slots + 1) for name, kind in fields.items()}, device)

    def add(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """A request has begun in a batch slot."""
        values = {
            "temperatures": 0.0 if params.is_greedy else params.temperature,
            "top_ks": params.top_k if 0 < params.top_k < self._vocab_size else 0,
            "top_ps": params.top_p,
            "min_ps": params.min_p,
            "seeds": 0 if params.is_greedy or params.seed is None else np.array(stream_key(params.seed), dtype=np.uint64).view(np.int64),
            _PROMPT_LENGTHS: num_prompt,
        }
        host = self._staged.rotate()
        for name, value in values.items():
            self._values[name][slot] = value
            host[name][:] = self._values[name]
        self._staged.upload()

    def draw(
        self, logits_SV: torch.Tensor, slots_S: torch.Tensor, places_S: torch.Tensor, token_ids_V: torch.Tensor | None
    ) -> torch.Tensor:
        """int64 [S]: the target's token for each row. slots_S, places_S: int64, batch slot and number of the token in its sequence.
        token_ids_V: the target's id of each token of the drafts' vocabulary, in order; None: they are the same.
        """
        own = {name: values[slots_S] for name, values in self._staged.device.items()}
        positions_S = places_S - own.pop(_PROMPT_LENGTHS)
        if self._shares_memory:
            tokens_S = self._draw_on_host(logits_SV, {name: values.numpy() for name, values in own.items()}, positions_S.numpy())
            return tokens_S if token_ids_V is None else token_ids_V[tokens_S]
        if token_ids_V is not None:  # noise belongs to the target's ids
            whole_SW = logits_SV.new_full((len(logits_SV), self._vocab_size), -torch.inf)
            logits_SV = whole_SW.index_copy_(1, token_ids_V, logits_SV)
        tokens_S, _ = sample_rows(logits_SV, [positions_S if name == "sample_positions" else own[name] for name in SAMPLING_FIELDS])
        return tokens_S

    def _draw_on_host(self, logits_SV: torch.Tensor, own: dict[str, np.ndarray], positions_S: np.ndarray) -> torch.Tensor:
        tokens_S, _ = argmax_rows(logits_SV)
        random = np.flatnonzero(own["temperatures"] > 0)
        numbers = uniforms(own["seeds"][random].view(np.uint64), positions_S[random])
        for row, number in zip(random.tolist(), numbers.tolist(), strict=True):
            logits_1V = logits_SV[row : row + 1].float()
            column = {name: torch.tensor([[float(own[name][row])]]) for name in ("temperatures", "top_ps", "min_ps")}
            inverse, uniform, log_min_p = 1.0 / column["temperatures"], torch.tensor([[number]]), column["min_ps"].log()
            top_k, top_p = int(own["top_ks"][row]), column["top_ps"] if own["top_ps"][row] < 1.0 else None
            token: torch.Tensor | int
            if 0 < top_k < logits_1V.shape[1]:
                token, _ = sample_top_k(logits_1V, top_k, inverse, log_min_p, top_p, uniform)
            elif top_p is not None:
                token, _ = sample_top_p(logits_1V, inverse, log_min_p, top_p, uniform)
            else:
                token = near_uniform(logits_1V[0] * inverse[0], float(log_min_p), number)
            tokens_S[row] = token
        return tokens_S


def near_uniform(logits_V: torch.Tensor, log_min_p: float, number: float) -> int:
    """The token whose interval of the cumulative distribution has the largest share of the window around `number`.

    logits_V: float32, divided by the temperature. log_min_p: tokens that are so much less likely than the likeliest are left out.
    """
    logits_V = logits_V - logits_V.max()
    logits_V = logits_V.masked_fill(logits_V < log_min_p, -torch.inf)
    ends_V = logits_V.exp().double().cumsum(0)
    ends_V /= ends_V[-1].clone()
    inside_V = ends_V.clamp(number - WINDOW, number + WINDOW)
    first = inside_V[:1] - min(max(0.0, number - WINDOW), number + WINDOW)
    return int(torch.cat((first, inside_V.diff())).argmax())
