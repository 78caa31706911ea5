"""`LaterLayers`: the layers for multi-token prediction behind the first one of a checkpoint.

Shape legend: T tokens of the target's step, S sequences, D hidden size, N layers with the first one, R batch slots, P tokens per page.

Layers are numbered from 0. At position p, layer k reads the hidden state of layer k - 1 at p (layer 0: the target's) and the embedding of
token p + k + 1, and predicts token p + k + 2 (DeepSeek-V3, arXiv:2412.19437, section 2.2). Here that is called the layer's entry p + k. So
for entry i, layer k reads what layer k - 1 gave for entry i - 1 and the embedding of token i + 1, and predicts token i + 2. For the same
entry, all layers read the same token. Keys and values of entry i therefore lie in the target's cache slot of position i. RoPE rotates by i,
which changes nothing, because it depends on differences alone.

- While the drafter follows the target, all layers compute the entries that the first layer computes. They read tokens that the target
  sampled or was given, and no draft. So rejected drafts need no second computation: the next step overwrites their entries. (If keys and
  values lay under p, the last k of layer k would depend on drafts. vLLM computes those again.)
- The hidden states of the last entry are kept by batch slot, for the first entry of the next step. Those of a page's last entry are kept by
  page, for a sequence that begins behind a prefix hit.
- Layer min(k, N - 1) makes draft k. The layers behind it compute the same entry, because their next one reads it. If there are more drafts
  than layers, the last layer goes on from its own output, as a single layer does.

Two kinds of entries differ from training. Layer k has no position for the entries before k: its hidden state there is zero. And the last
entry of a shared prefix was computed with the token behind it in the sequence that came first, as with every drafter. The target checks all
drafts, so only acceptance may suffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.custom_ops.step import HIDDEN_STATES, LOGITS_INDICES, POSITIONS, Step
from compile_and_serve.runtime.drafting.hidden_drafts import SequenceRows
from compile_and_serve.runtime.side_model import SideModel


class LaterLayers:
    """Call `follow` when the first layer has followed the target, and `draft` for each draft but the first."""

    def __init__(
        self,
        layers: tuple[SideModel, ...],
        states: tuple[Mapping[str, torch.Tensor], ...],
        num_slots: int,
        num_pages: int,
        tokens_per_page: int,
        hidden_like: torch.Tensor,
    ) -> None:
        """states: keys and values of each layer, in `num_pages` pages. hidden_like: has the size, dtype and device of hidden states."""
        self._layers, self._states, self._tokens_per_page = layers, states, tokens_per_page
        # Hidden states of all layers but the last: by batch slot, then a row for padding sequences; by page, then a page that nobody reads.
        by_slot, by_page = ((len(layers), count + 1, hidden_like.shape[-1]) for count in (num_slots, num_pages))
        self._hidden, self._page_hidden = hidden_like.new_zeros(by_slot), hidden_like.new_zeros(by_page)
        # The last entry, by batch slot.
        self._ends = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=hidden_like.device)
        self._one_row = torch.zeros(1, dtype=torch.int64, device=hidden_like.device)

    def add(self, slot: int) -> None:
        """A request has begun in a batch slot: what the slot's last one has left is not its own."""
        self._ends[slot] = -1

    def follow(self, first: Step, hidden_TD: torch.Tensor, sequences: SequenceRows | None) -> None:
        """Compute the entries of the first layer's step. hidden_TD: what that layer gave. sequences: of the step; None: a dummy step."""
        positions_T = first.inputs[POSITIONS.name]
        if sequences is not None:
            (metadata,) = first.metadata.values()
            size, slots_T = self._tokens_per_page, metadata.slot_mapping
            befores_S = positions_T[sequences.firsts] - 1
            is_known_S1 = (befores_S == self._ends[sequences.slots])[:, None]
            self._ends.index_copy_(0, sequences.slots, positions_T[sequences.lasts])
            columns_S1 = (befores_S // size).clamp_(min=0)[:, None]
            read_S = metadata.block_table[: len(befores_S)].gather(1, columns_S1)[:, 0].long()
            is_kept_S1 = ((befores_S >= 0) & (befores_S % size == size - 1))[:, None]
            is_written_T = (slots_T >= 0) & (slots_T % size == size - 1)
            written_T = torch.where(is_written_T, slots_T // size, self._page_hidden.shape[1] - 1)
        for index, layer in enumerate(self._layers):
            before_TD = hidden_TD.roll(1, 0)
            if sequences is not None:
                kept_SD = torch.where(is_kept_S1, self._page_hidden[index][read_S], 0)
                kept_SD = torch.where(is_known_S1, self._hidden[index][sequences.slots], kept_SD)
                before_TD.index_copy_(0, sequences.firsts, kept_SD)
                self._page_hidden[index].index_copy_(0, written_T, hidden_TD)
                self._hidden[index].index_copy_(0, sequences.slots, hidden_TD[sequences.lasts])
            inputs = first.inputs | {HIDDEN_STATES: before_TD, LOGITS_INDICES.name: self._one_row}
            step = replace(first, inputs=inputs, state=self._states[index], num_rows=1)
            if index == len(self._layers) - 1 and isinstance(layer.model, CompiledModel) and layer.model.writes_state:
                layer.model.writes_state(step)
            else:
                hidden_TD = layer.model(step)[HIDDEN_STATES]

    def known_hidden(self, slots_S: torch.Tensor) -> dict[int, torch.Tensor]:
        """Layer → hidden states [S, D] of the last entry, as `draft` takes them."""
        return {index: self._hidden[index][slots_S] for index in range(len(self._layers))}

    def draft(self, number: int, step: Step, hidden: Mapping[int, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[int, torch.Tensor]]:
        """Make a draft of each sequence: the outputs of its layer, and the hidden states for the next one.

        number: of the draft, from 0; `follow` makes draft 0. step: one token of each sequence. hidden: of the entry before.
        """
        assert number > 0
        drafting = min(number, len(self._layers))
        outputs: dict[str, torch.Tensor] = {}
        given: dict[int, torch.Tensor] = {}
        for index in range(drafting, len(self._layers) + 1):
            rows = step.inputs[LOGITS_INDICES.name] if index == drafting else self._one_row
            before_SD = hidden[index - 1 if index >= number else index]
            inputs = step.inputs | {HIDDEN_STATES: before_SD, LOGITS_INDICES.name: rows}
            one = self._layers[index - 1].model(replace(step, inputs=inputs, state=self._states[index - 1], num_rows=len(rows)))
            given[index] = one[HIDDEN_STATES]
            if index == drafting:
                outputs = one
        return outputs, given
