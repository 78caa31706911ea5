"""What requests give to step inputs. This file imports no torch, for the process that schedules beside its ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
import numpy as np

StepDatum = int | float | str | bool  # a value in a request's step data
ADAPTER_SLOT = "adapter_slot"  # in step data: 1 + the slot of the LoRA adapter that a request uses
CROSS_ROWS_DATUM = "cross_rows"  # in step data: rows of the items beside a request, which its tokens read by cross-attention
SOURCE_IDS = "source_ids"  # array of an item: the tokens that a text encoder reads, int64
CROSS_SPANS_ARRAY = "cross_spans"  # int32 [tokens, 2]: the first page of the items that a token reads by cross-attention, and how many rows
PROMPT_LENGTH = "prompt_length"  # in step data of models that read whole prompts: tokens of the prompt
SECOND_TEXT = "second_text"  # in step data: the first token of the second text, of a prompt that is a pair of texts

ROPE_LENGTH_DATUM = "rope_length"  # in step data: the length that all tokens of a sequence are computed as of; 0: their own

ArrayDtype = Literal["uint8", "int32", "int64", "float16", "bfloat16", "float32"]


class StepArray(msgspec.Struct, frozen=True, kw_only=True):
    """Values for the tokens `start`, `start` + 1, … of a prompt, a row for each token.

    dtype: of the values. row_shape: of a token's row. data: the bytes of the rows one after another, row-major. Nobody changes them.
    """

    start: int = 0
    dtype: ArrayDtype
    row_shape: tuple[int, ...] = ()
    data: memoryview

    @classmethod
    def of(cls, values: Any, *, start: int = 0, axis: int = 0) -> StepArray:
        """From an array or a CPU tensor whose dimension `axis` is tokens. Raises `ValueError` for a dtype that is no `ArrayDtype`."""
        dtype: Any = str(values.dtype).removeprefix("torch.")
        if dtype not in get_args(ArrayDtype):
            raise ValueError(f"A request's array must be one of {', '.join(get_args(ArrayDtype))}, got {dtype}.")
        if not isinstance(values, np.ndarray):
            import torch

            # numpy has no bfloat16.
            values = (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
        rows = np.ascontiguousarray(np.moveaxis(values, axis, 0))
        return cls(start=start, dtype=dtype, row_shape=rows.shape[1:], data=memoryview(rows.tobytes()))

    @classmethod
    def holding(cls, rows_TR: np.ndarray) -> StepArray:
        """Of a contiguous array of an `ArrayDtype` that its owner gives away: it is not copied."""
        dtype: Any = str(rows_TR.dtype)
        return cls(dtype=dtype, row_shape=rows_TR.shape[1:], data=rows_TR.reshape(-1).view(np.uint8).data.toreadonly())

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * _numpy_type(self.dtype).itemsize

    @property
    def end(self) -> int:
        """The first token behind those that have values."""
        return self.start + len(self.data) // max(1, self.row_bytes)

    def rows(self, begin: int, end: int) -> np.ndarray:
        """[end - begin, *row_shape]: the rows of tokens `begin` … `end` - 1, which have values; bfloat16 comes as float32."""
        size = self.row_bytes
        raw = np.frombuffer(self.data, _numpy_type(self.dtype), (end - begin) * math.prod(self.row_shape), (begin - self.start) * size)
        if self.dtype == "bfloat16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.reshape(end - begin, *self.row_shape)


RequestArrays = Mapping[str, Sequence[StepArray]]  # of one request, by name, in the order of their tokens


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """Something in a prompt that is no text: an image, say. It stands at the tokens `position` … `position` + `length` - 1. Or it stands
    beside the prompt (`is_beside`): layers read its `length` rows by cross-attention, and it counts for the prefix from `position` on.

    key: names its content, and how it was processed: items of equal keys behind equal prompts must have equal arrays, and the encoder's
    arrays of items of equal keys must be equal wherever they stand.
    arrays: its values for these tokens, and for the first one behind them, by name.
    """

    key: bytes
    position: int
    length: int
    arrays: dict[str, StepArray] = {}
    is_beside: bool = False


class LengthRegimes(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of more than `limit` tokens are computed in another way than shorter ones, and share no cached prefix with them.

    by_length: nor with prompts of other lengths. recompute: a sequence that grows beyond the limit is computed again.
    """

    limit: int
    by_length: bool
    recompute: bool

    def length_of(self, num_tokens: int) -> int:
        """`ROPE_LENGTH_DATUM` of a sequence that is computed with so many tokens."""
        if num_tokens <= self.limit:
            return 0
        return num_tokens if self.by_length else self.limit + 1


class ArrayInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An array that a step input reads. row_shape: of a token's row. is_floating: of its dtype. limit: of integers: they are 0 …
    `limit` - 1; None: any. is_whole: it has one row of any size, which belongs to a media item as a whole, and stands at its first token.
    """

    name: str
    row_shape: tuple[int, ...] = ()
    is_floating: bool = False
    limit: int | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class PromptContents:
    """What stands beside a prompt's tokens. media: sorted by position. arrays: of the request itself, not those of the media."""

    media: Sequence[MediaItem]
    arrays: Mapping[str, StepArray]

    @classmethod
    def of(cls, media: Sequence[MediaItem], arrays: Mapping[str, StepArray]) -> PromptContents | None:
        """None where there is nothing."""
        if not media and not arrays:
            return None
        return cls(sorted(media, key=lambda item: item.position), dict(sorted(arrays.items())))

    def all_arrays(self, *, without: Collection[str] = ()) -> dict[str, list[StepArray]]:
        """Those of the request and of its media, by name. without: names that are left out."""
        found: dict[str, list[StepArray]] = {}
        for arrays in (self.arrays, *(item.arrays for item in self.media)):
            for name, array in ((name, array) for name, array in arrays.items() if name not in without):
                found.setdefault(name, []).append(array)
        for several in found.values():
            several.sort(key=lambda array: array.start)
        return found

    def check(self, num_tokens: int, known: Iterable[ArrayInfo]) -> None:
        """Raise `ValueError` with one sentence if they do not fit a prompt of `num_tokens` tokens, or the arrays of the model's inputs."""
        for item in self.media:
            if item.is_beside and not (item.length >= 1 and 0 <= item.position < num_tokens):
                raise ValueError(
                    f"A media item is read from token {item.position} of a prompt of {num_tokens} on: that must be one of them."
                )
        end = 0
        for item in (one for one in self.media if not one.is_beside):
            if item.length < 1 or item.position < end or item.position + item.length > num_tokens:
                raise ValueError(
                    f"A media item stands at tokens {item.position} to {item.position + item.length - 1} of a prompt of {num_tokens}: "
                    "media must lie inside of the prompt, one behind the other."
                )
            end = item.position + item.length
            for name, array in item.arrays.items():
                if not item.position <= array.start <= array.end <= end + 1:
                    raise ValueError(f"The array {name!r:.100} of a media item has values for other tokens than the item's.")
        infos = {info.name: info for info in known}
        beside = {name for item in self.media if item.is_beside for name in item.arrays}
        for name, several in self.all_arrays().items():
            if name not in infos:
                known_names = ", ".join(infos) or "none"
                raise ValueError(f"The model's inputs read no array {name!r:.100}: they read {known_names}.")
            end = 1
            for array in several:
                _check_array(array, infos[name])
                # A piece may have a row for the first token behind it, where the next piece may begin.
                if name in beside:
                    continue
                if array.start < end - 1 or array.end > num_tokens + 1 or array.start == array.end:
                    raise ValueError(
                        f"The array {name!r} has values for tokens {array.start} to {array.end - 1} of a prompt of {num_tokens}: arrays "
                        "have rows for tokens of the prompt, one for each at most."
                    )
                end = array.end


def _check_array(array: StepArray, info: ArrayInfo) -> None:
    is_floating = "float" in array.dtype
    if (tuple(array.row_shape) != info.row_shape and not info.is_whole) or is_floating != info.is_floating:
        kind = "floating" if info.is_floating else "integer"
        raise ValueError(
            f"The array {info.name!r} has {array.dtype} rows of shape {list(array.row_shape)}: the model reads {kind} rows of shape "
            f"{list(info.row_shape)}."
        )
    if array.row_bytes and len(array.data) % array.row_bytes:
        raise ValueError(f"The array {info.name!r} has {len(array.data)} bytes, no multiple of {array.row_bytes}, which a row has.")
    if info.limit is not None and array.data:
        values = array.rows(array.start, array.end)
        if values.min() < 0 or values.max() >= info.limit:
            raise ValueError(
                f"The array {info.name!r} has values from {values.min()} to {values.max()}: they must be 0 to {info.limit - 1}."
            )


def _numpy_type(dtype: ArrayDtype) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
