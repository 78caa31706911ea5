"""`MediaEncoder`: a model beside the engine's, whose output rows the engine's model reads in its graph.

Shape legend: T tokens of the items in a step, R rows, D width of a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.custom_ops.encoder_rows import ROWS_PER_PAGE, num_rows_of, row_numbers
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import Platform
from compile_and_serve.custom_ops.state.cross import CrossAttention
from compile_and_serve.custom_ops.step import ALIGNMENT_QUERIES, TOKENS, Step, TokenBatch
from compile_and_serve.custom_ops.step_data import ArrayInfo, StepArray
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.ahead import TOKENS_AHEAD
from compile_and_serve.models.vision.names import EMBEDDED
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, EncoderInfo
from compile_and_serve.runtime.side_model import SideModel

_SHORT_ITEM = 64  # tokens
STEPS_OF_ROWS = 2  # the region has rows for the items of so many full steps: of the step at hand, and some that others may share


def encoder_info(spec: ModelSpec, config: EngineConfig) -> EncoderInfo | None:
    """The limits of a model's encoder; None: it has none. Raises `ValueError` with one sentence."""
    encoder = spec.encoder
    if encoder is None:
        return None
    if spec.pooling is not None or config.mesh.pipe > 1:
        raise ValueError("A model with an encoder must generate tokens, in one stage: see ModelSpec.encoder.")
    if spec.whole_prompts and spec.cross_group is not None:
        raise ValueError("A model that reads items by cross-attention must take prompts that may be cut: see ModelSpec.whole_prompts.")
    cross = spec.cross_group
    if cross is None:
        dims = [encoder.outputs[0].dims, *((TOKENS, *one.shape) for one in spec.row_group.layout(1, torch.float32).tensors.values())]
    else:
        width = sum(math.prod(one.shape) for one in cross.layout(1, torch.float32).tensors.values())
        dims = [encoder.outputs[0].dims, (TOKENS, width)]
    if encoder.state or len(dims) != 2 or dims[0] != dims[1]:
        raise ValueError(
            f"The encoder must keep no state and give rows of the model's one tensor of rows, got {dims}: see ModelSpec.encoder."
        )
    if cross is not None and encoder.leading_rows:
        raise ValueError("An encoder whose rows are read by cross-attention can have no leading_rows: see ModelSpec.encoder.")
    longest, budget = encoder.max_model_len, config.scheduler.max_encoder_tokens
    needed = longest + encoder.leading_rows
    if budget is None:
        budget = max(needed, config.scheduler.token_budget)
    if budget < needed:
        raise ValueError(f"max_encoder_tokens is {budget}, but one item may have {needed} tokens: raise --max-encoder-tokens.")
    is_whole = TOKENS_AHEAD in spec.inputs
    room = config.scheduler.token_budget - config.scheduler.max_num_seqs
    if is_whole and room < longest:
        raise ValueError(
            f"Steps have room for {room} tokens beside {config.scheduler.max_num_seqs} decodes, but this model computes an image's "
            f"{longest} tokens in one step: raise --max-num-batched-tokens or lower --max-num-seqs."
        )
    return EncoderInfo(
        arrays=[array.name for one in encoder.inputs for array in one.arrays],
        embedded="" if cross else EMBEDDED,
        is_whole=is_whole,
        whole_prompts=spec.whole_prompts,
        whole_arrays=[array.name for one in encoder.inputs for array in one.arrays if array.is_whole],
        max_tokens=budget,
        max_item_tokens=longest,
        leading_rows=encoder.leading_rows,
        num_pages=0 if cross else -(-STEPS_OF_ROWS * budget // ROWS_PER_PAGE),
        rows_per_page=ROWS_PER_PAGE,
        fills_items=cross is not None,
        is_required=isinstance(kind := None if cross is None else cross.kind, CrossAttention) and kind.is_required,
        max_aligned_rows=longest if any(one.name == ALIGNMENT_QUERIES for one in spec.outputs) else 0,
        decoder_start=list(spec.decoder_start),
    )


def row_bytes(spec: ModelSpec, info: EncoderInfo) -> int:
    """What the region of rows takes."""
    return num_rows_of(info.num_pages) * spec.row_group.layout(1, torch.float32).page_bytes


class RowEncoder(Protocol):
    """What computes the rows of media items. has_region: the model's tokens read rows of a region by number. max_tokens: of a step."""

    has_region: bool
    max_tokens: int

    def share(self, state: dict[str, torch.Tensor]) -> None:
        """Add the region [R, D] to the tensors of the model's state, or keep those that the rows fill."""
        ...

    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Compute the rows of items, without waiting for the device."""
        ...

    def run_largest(self) -> None:
        """Run the largest step that there can be, keep nothing, and wait for it."""
        ...

    def run_longest_item(self) -> None:
        """The same with one item of the greatest length, or a shorter one where nothing is made for a size."""
        ...

    def run_dummy(self, num_tokens: int) -> None:
        """The same with `num_tokens` tokens."""
        ...

    def dummy_step(self, num_tokens: int) -> Step:
        """What `run_dummy` runs, of an encoder that has graphs."""
        ...


def embedded_info(spec: ModelSpec) -> ArrayInfo:
    """The array of an item that comes with its rows."""
    ((_, placed),) = spec.row_group.layout(1, torch.float32).tensors.items()
    return ArrayInfo(name=EMBEDDED, row_shape=tuple(placed.shape), is_floating=True)


def write_given_rows(rows_RD: torch.Tensor, items: Sequence[EncodeItem], platform: Platform) -> list[EncodeItem]:
    """Write the rows of items that came with them to the region. → the other items"""
    for one in items:
        if (array := one.arrays.get(EMBEDDED)) is not None:
            given_TD = torch.from_numpy(array.rows(0, one.length).astype(np.float32)).to(rows_RD.device)
            numbers_T = platform.upload(row_numbers(one.page_ids, one.length), through_pinned=True)
            rows_RD.index_copy_(0, numbers_T, given_TD.to(rows_RD.dtype))
    return [one for one in items if EMBEDDED not in one.arrays]


def region_of(spec: ModelSpec, info: EncoderInfo, device: torch.device) -> tuple[str, torch.Tensor]:
    """The name and the zeroed region [R, D] of a model's rows."""
    ((name, placed),) = spec.row_group.layout(1, torch.float32).tensors.items()
    return name, torch.zeros(num_rows_of(info.num_pages), *placed.shape, dtype=placed.dtype, device=device)


class PackedEncoder(ABC):
    """A `RowEncoder` whose steps hold many items."""

    has_region = True

    def __init__(
        self, side: SideModel, steps: PlainRunner | CudaGraphRunner, spec: ModelSpec, info: EncoderInfo, device: torch.device
    ) -> None:
        """steps: runs the side model. spec: of the engine's model."""
        self._steps, self._info = steps, info
        self.max_tokens = info.max_tokens
        self._longest = info.max_item_tokens + info.leading_rows
        self._platform = platform_of(device)
        self._output = side.spec.outputs[0].name
        limit = info.max_tokens
        self._buffers = StepBuffers(side.spec.inputs, (), max_tokens=limit, max_seqs=limit, max_sampled=1, max_rows=limit, device=device)

    @abstractmethod
    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Compute the rows of items, without waiting for the device."""

    def _rows_of(self, items: Sequence[EncodeItem]) -> torch.Tensor:
        """The encoder's output for items: [T, D]."""
        leading = self._info.leading_rows
        lengths = [leading + one.length for one in items]
        arrays = [{name: [replace(array, start=array.start + leading)] for name, array in one.arrays.items()} for one in items]
        step = self._step(lengths, arrays)
        rows_TD = self._steps.run(step).outputs[self._output][: step.num_tokens]  # without padding
        if not leading:
            return rows_TD
        behind = np.cumsum(lengths)
        kept_T = np.concatenate([np.arange(end - one.length, end) for end, one in zip(behind, items, strict=True)])
        return rows_TD[self._platform.upload(kept_T, through_pinned=True)]

    def run_largest(self) -> None:
        """`run_dummy` of the largest step that there can be."""
        self.run_dummy(self.max_tokens)

    def run_longest_item(self) -> None:
        """`run_dummy` of one item of the greatest length. On the CPU a short one does, because nothing there is made for a size."""
        longest = self._longest
        self.run_dummy(min(longest, _SHORT_ITEM) if self._platform.shares_host_memory else longest)

    def run_dummy(self, num_tokens: int) -> None:
        """Run `dummy_step`, keep nothing, and wait for it."""
        self._steps.run(self.dummy_step(num_tokens))
        self._platform.synchronize()

    def dummy_step(self, num_tokens: int) -> Step:
        """A step of `num_tokens` tokens of items of zeros, as few as there can be."""
        count, rest = divmod(num_tokens, self._longest)
        lengths = [self._longest] * count + [rest] * (rest > 0)
        return self._step(lengths, [{}] * len(lengths))

    def _step(self, lengths: Sequence[int], arrays: Sequence[Mapping[str, Sequence[StepArray]]]) -> Step:
        """The step of items of these lengths, padded to the tokens of its graphs."""
        counts = np.array(lengths, dtype=np.int64)
        num_tokens, num_seqs = int(counts.sum()), len(counts)
        buffers = self._buffers
        host = buffers.rotate()
        starts = host["query_start_loc"][: num_seqs + 1]
        starts[0] = 0
        np.cumsum(counts, out=starts[1:])
        host["seq_lens"][:num_seqs] = counts
        batch = TokenBatch(
            token_ids=np.zeros(num_tokens, dtype=np.int64),
            positions=np.arange(num_tokens) - np.repeat(starts[:-1], counts),
            query_start_loc=starts,
            row_indices=np.arange(num_tokens),
            arrays=arrays,
        )
        longest = int(counts.max())
        size = self._steps.padded_size(num_tokens, num_seqs, longest) or num_tokens
        buffers.fill(batch, size, num_tokens)
        buffers.upload_used(size, num_tokens)
        return buffers.step(
            size,
            num_seqs,
            num_tokens,
            state={},
            tables={},
            backends={},
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            max_query_len=longest,
            max_seq_len=longest,
            uses_optional=True,
        )


class MediaEncoder(PackedEncoder):
    """Its rows lie in a region of their own."""

    def __init__(
        self, side: SideModel, steps: PlainRunner | CudaGraphRunner, spec: ModelSpec, info: EncoderInfo, device: torch.device
    ) -> None:
        super().__init__(side, steps, spec, info, device)
        self._name, self._rows_RD = region_of(spec, info, device)

    def share(self, state: dict[str, torch.Tensor]) -> None:
        state[self._name] = self._rows_RD

    def encode(self, items: Sequence[EncodeItem]) -> None:
        items = write_given_rows(self._rows_RD, items, self._platform)
        if items:
            rows_T = np.concatenate([row_numbers(one.page_ids, one.length) for one in items])
            outputs_TD = self._rows_of(items).to(self._rows_RD.dtype)
            self._rows_RD.index_copy_(0, self._platform.upload(rows_T, through_pinned=True), outputs_TD)
