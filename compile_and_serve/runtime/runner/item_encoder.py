"""Encoders of the transformers package, which run as they are written, on one media item at a time."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.cross_attention import CROSS_SPANS
from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, row_numbers
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.whole_items import PROCESSED, unpacked
from compile_and_serve.runtime.config import ModelConfig
from compile_and_serve.runtime.media.images import pillow
from compile_and_serve.runtime.media.prepared import MediaError, PreparedItem
from compile_and_serve.runtime.media.registry import MediaProcessor, media_processor
from compile_and_serve.runtime.media.speech import SpeechProcessor
from compile_and_serve.runtime.media.videos import Frames
from compile_and_serve.runtime.runner.cross_encoder import CrossCaches
from compile_and_serve.runtime.runner.media_encoder import region_of, write_given_rows
from compile_and_serve.runtime.runner.model_facts import media_info
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, EncoderInfo
from compile_and_serve.runtime.side_model import SideModel

log = logging.getLogger(__name__)

# Width and height of images, among which are those with the most tokens and one with few.
_SIZES = ((4096, 4096), (4096, 1024), (1024, 4096), (1024, 1024), (448, 448))
_LONG_VIDEO = (1_000_000, 24.0)  # frames, and frames a second


def with_longest_item(spec: ModelSpec, model: ModelConfig) -> tuple[ModelSpec, list[PreparedItem]]:
    """The spec with the length of the longest item that the folder's processor makes, and the shortest and that item.

    Nothing changes, and there are none, for a model without such an encoder. Without a processor the model reads text alone.
    """
    if spec.encoder is None or spec.encoder.eager_reason is None:
        return spec, []
    try:
        processor = media_processor(media_info(model, spec))
        assert processor is not None
        if "audio" in processor.placeholders.values():
            items = _speech_items(processor, spec.max_model_len)
        else:
            items = [processor.image(pillow().new("RGB", size), b"").items[0] for size in _SIZES]
        if "video" in processor.placeholders.values():
            numbers = processor.sample(*_LONG_VIDEO)
            frames = Frames([pillow().new("RGB", _SIZES[-1])] * len(numbers), numbers, _LONG_VIDEO[1], _LONG_VIDEO[0])
            items += processor.frames(frames, b"").items
    except MediaError as error:
        log.warning("The model reads text alone here: %s", error)
        filled = spec.cross_group or spec.row_group
        state = tuple(one for one in spec.state if one is not filled)
        return replace(
            spec, encoder=None, state=state, inputs=tuple(one for one in spec.inputs if one not in (ENCODER_ROW, CROSS_SPANS))
        ), []
    items.sort(key=lambda item: item.length)
    if spec.cross_group is not None:  # an item may be several images
        return spec, [items[0], items[-1]]
    return replace(spec, encoder=replace(spec.encoder, max_model_len=items[-1].length)), [items[0], items[-1]]


def _speech_items(processor: MediaProcessor, max_tokens: int) -> list[PreparedItem]:
    assert isinstance(processor, SpeechProcessor)
    return list(processor.shortest_and_longest(max_tokens))


class WholeItems(ABC):
    """A `RowEncoder` whose model computes one item at a time."""

    has_region: bool

    def __init__(self, side: SideModel, info: EncoderInfo, items: Sequence[PreparedItem], device: torch.device) -> None:
        """items: from a short one to one of the greatest length."""
        self._model: Model = side.model
        self._output = side.spec.outputs[0].name
        self._items, self._device, self._platform = items, device, platform_of(device)
        self.max_tokens = info.max_tokens

    @abstractmethod
    def share(self, state: dict[str, torch.Tensor]) -> None:
        """See `RowEncoder`."""

    @abstractmethod
    def encode(self, items: Sequence[EncodeItem]) -> None:
        """Compute the rows of items, one after another."""

    def run_largest(self) -> None:
        """See `RowEncoder`."""
        self._run(self._items[-1])

    def run_longest_item(self) -> None:
        """See `RowEncoder`."""
        self._run(self._items[0 if self._platform.shares_host_memory else -1])

    def run_dummy(self, num_tokens: int) -> None:  # noqa: B027 (nothing is to be done)
        """Nothing is made for a number of tokens."""

    def dummy_step(self, num_tokens: int) -> Step:
        """It has no graphs."""
        raise AssertionError("an encoder of single items has no graphs")

    def _run(self, item: PreparedItem) -> None:
        self._rows_of(item.arrays[PROCESSED.name], item.length)
        self._platform.synchronize()

    def _rows_of(self, array: StepArray, length: int) -> torch.Tensor:
        tensors = unpacked(array, self._device)
        step = Step(
            inputs=tensors,
            state={},
            metadata={},
            num_tokens=length,
            num_seqs=1,
            padded_tokens=length,
            padded_seqs=1,
            num_rows=length,
            max_query_len=length,
        )
        rows_TD = self._model(step)[self._output]
        assert len(rows_TD) == length, f"the encoder gives {len(rows_TD)} rows for an item of {length} tokens"
        return rows_TD


class ItemEncoder(WholeItems):
    """Its rows lie in a region of their own."""

    has_region = True

    def __init__(self, side: SideModel, spec: ModelSpec, info: EncoderInfo, items: Sequence[PreparedItem], device: torch.device) -> None:
        """spec: of the engine's model."""
        super().__init__(side, info, items, device)
        self._name, self._rows_RD = region_of(spec, info, device)

    def share(self, state: dict[str, torch.Tensor]) -> None:
        state[self._name] = self._rows_RD

    def encode(self, items: Sequence[EncodeItem]) -> None:
        for one in write_given_rows(self._rows_RD, items, self._platform):
            rows_TD = self._rows_of(one.arrays[PROCESSED.name], one.length)
            numbers_T = self._platform.upload(row_numbers(one.page_ids, one.length).astype(np.int64), through_pinned=True)
            self._rows_RD.index_copy_(0, numbers_T, rows_TD.to(self._rows_RD.dtype))


class CrossItemEncoder(WholeItems):
    """Its rows are the keys and values of cross-attention."""

    has_region = False

    def __init__(
        self, side: SideModel, caches: CrossCaches, info: EncoderInfo, items: Sequence[PreparedItem], device: torch.device
    ) -> None:
        super().__init__(side, info, items, device)
        self._caches = caches

    def share(self, state: dict[str, torch.Tensor]) -> None:
        self._caches.take(state)

    def encode(self, items: Sequence[EncodeItem]) -> None:
        for one in items:
            self._caches.write([one], self._rows_of(one.arrays[PROCESSED.name], one.length))
