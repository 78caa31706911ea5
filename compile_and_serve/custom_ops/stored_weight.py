"""`StoredWeight`: how a checkpoint holds a parameter that it holds quantized, or in another order of its elements.

A checkpoint format (`models/quantization/`) makes one for each parameter. Whoever compiles, loads, verifies or invents a checkpoint asks
it, and knows no format. `parts` is what kernels take. A format that no kernel takes has none, and is dequantized while it is loaded.

Shape legend: X experts, O output features, I input features, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from compile_and_serve.custom_ops.quantization import BLOCK, LARGEST, Activations
from compile_and_serve.custom_ops.quantized.group_layout import TABLES
from compile_and_serve.custom_ops.quantized.group_linear import group_linear_unsupported_reason
from compile_and_serve.custom_ops.quantized.quantized_linear import quantized_linear_unsupported_reason
from compile_and_serve.custom_ops.weight_functions import Expression, Text, weight_function

Fill = Callable[[torch.Tensor, float, torch.Generator], object]  # (tensor to fill, standard deviation of the weight, generator)


def random_bits(limit: int | None = None) -> Fill:
    """Packed codes: any bits, or integers from 0 to below `limit`."""

    def fill(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
        limits = torch.iinfo(tensor.dtype)
        return tensor.random_(*((limits.min, limits.max) if limit is None else (0, limit)), generator=generator)

    return fill


def near_middle(bits: int, *, less: int = 0) -> Fill:
    """Packed zero points: 2^(bits − 1) or 1 less, so that weights are as often negative as positive. less: what is taken off when stored.

    They are a stream of bits along the last dimension, from the lowest bit of a word on.
    """
    words = bits // math.gcd(bits, 32)  # after which a point begins with a word again
    shifts = range(0, 32 * words, bits)

    def fill(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
        points = torch.randint(0, 2, (tensor.numel() // words, len(shifts)), device=tensor.device, generator=generator)
        points += (1 << bits - 1) - 1 - less
        packed = torch.zeros(len(points), words + 1, dtype=torch.int64, device=tensor.device)
        for point, shift in zip(points.unbind(1), shifts, strict=True):
            whole = point << shift % 32
            packed[:, shift // 32] += whole & 0xFFFFFFFF
            packed[:, shift // 32 + 1] += whole >> 32
        return tensor.copy_(packed[:, :words].reshape(tensor.shape))

    return fill


def around(value: Callable[[float], float]) -> Fill:
    """Scales: `value(std of the weight)`, up to a sixteenth more or less."""

    def fill(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
        spread = torch.empty(tensor.shape, device=tensor.device).uniform_(15 / 16, 17 / 16, generator=generator)
        return tensor.copy_(spread.mul_(value(std)))

    return fill


def exponents(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
    """Scales of MXFP4: one of two adjacent powers of two."""
    largest = 127 + round(math.log2(std / codes_std(4, "e2m1") / math.sqrt(5 / 8)))
    return tensor.random_(largest - 1, largest + 1, generator=generator)


def bell_curve(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
    """8-bit values."""
    values = torch.empty(tensor.shape, device=tensor.device).normal_(0.0, _values_std(tensor.dtype), generator=generator)
    return tensor.copy_(values.clamp_(-LARGEST[tensor.dtype], LARGEST[tensor.dtype]))


def shuffled_groups(group_size: int) -> Fill:
    """The group of each input ("act-order"). All weights of a size have the same, because merged ones must agree."""

    def fill(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
        order = torch.randperm(len(tensor), generator=torch.Generator().manual_seed(len(tensor)))
        return tensor.copy_(order // group_size)

    return fill


def codes_std(bits: int, table: str = "") -> float:
    """Standard deviation of the numbers that random codes mean: integers less a zero point near their middle, or a table's."""
    if not table:
        return math.sqrt(((1 << 2 * bits) - 1) / 12)
    return math.sqrt(sum(value * value for value in TABLES[table]) / len(TABLES[table]))


def _values_std(dtype: torch.dtype) -> float:
    return LARGEST[dtype] / 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """A checkpoint tensor that is a part of a stacked one: parameter[index, first_row : first_row + num_rows]."""

    parameter: str
    index: int
    first_row: int
    num_rows: int

    def of_scales(self, parameter: str, rows: int) -> TensorPart:
        """The part of stacked scales, one for `rows` rows, that goes with it."""
        return replace(self, parameter=parameter, first_row=self.first_row // rows, num_rows=-(-self.num_rows // rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    fill: makes an example of its values. weight_power, input_power: 1 or −1 if the weight, or the inputs that it is made for, are
    proportional to this power of the tensor, whose dtype holds the product with any power of two. padding: a checkpoint's tensor may be
    shorter, and is then filled up with this value. stacked_from: checkpoint tensor → the part of this one that it is.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Fill = field(default=random_bits(), compare=False, repr=False)
    weight_power: int = 0
    input_power: int = 0
    padding: int | None = None
    stacked_from: Mapping[str, TensorPart] = field(default_factory=dict)

    def example(self, std: float, generator: torch.Generator) -> torch.Tensor:
        """Values as a checkpoint might have them, of a weight with the standard deviation `std`, on the generator's device."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device=generator.device)
        self.fill(tensor, std, generator)
        return tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledParts:
    """weight = values · scale, for `cas::quantized_linear`, and of experts for `cas::experts`.

    values: `dtype` [O, I] or [X, O, I]. scale: float32 [O] or [X, O], per_block [ceil(O / 128), ceil(I / 128)] of each matrix.
    activations: that the weight is made for. input_scale: of "static" ones, float32 [1].
    """

    values: Expression
    scale: Expression
    dtype: torch.dtype
    per_block: bool = False
    activations: Activations = "none"
    input_scale: Expression = None

    @property
    def layout(self) -> Any:
        """Equal for weights that a kernel can multiply as one."""
        return self.dtype, self.activations, self.per_block

    def plain(self, dtype: torch.dtype) -> Expression:
        """The dequantized weight."""
        return ("dequantize", self.values, self.scale, dtype)

    def slow_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why no kernel multiplies activations of `dtype` with it here, in one sentence; None: one does."""
        return quantized_linear_unsupported_reason(device=device, dtype=dtype, weight_dtype=self.dtype, per_block=self.per_block)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedParts:
    """weight = (code − zero point) · scale, code · scale + minimum, or table[code] · scale, for `cas::group_linear`.

    codes: uint8 [O, I], less than 2^bits. scale: [O, G]. offset: [O, G], zero points as uint8, or minima as floating-point numbers; None:
    the zero point is 2^(bits − 1). input_groups: int [I], the group of each input ("act-order"); None: groups are `group_size` adjacent
    inputs. table: a name of `group_layout.TABLES`, without offsets. activations: dtype to which activations are rounded, one scale per
    token. input_order: int64 [I], the order of x's columns in which groups are adjacent. width: columns of codes, if those with the index
    I in the order are zeros.
    scale_factor: [O, S], floating-point factors of the scales, each of several groups. offset_factor: the same of offsets, which then mean
    minima −offset · factor. plain_scale: the product of scale and factor, where the file means it rounded otherwise.
    """

    codes: Expression
    scale: Expression
    bits: int
    group_size: int
    offset: Expression = None
    input_groups: Expression = None
    table: str = ""
    activations: torch.dtype | None = None
    input_order: Expression = None
    width: int | None = None
    scale_factor: Expression = None
    offset_factor: Expression = None
    plain_scale: Expression = None

    @property
    def container_bits(self) -> int:
        """Bits of a code as the kernels of linears store it. They take integers in groups of 16 with 8 bits only."""
        return 4 if self.bits <= 4 and (self.table or self.group_size % 32 == 0) else 8

    @property
    def compact_bits(self) -> int:
        """The same of the kernels of experts."""
        return self.bits if (self.bits, self.group_size) in ((5, 32), (6, 16)) else self.container_bits

    def without_factors(self) -> GroupedParts:
        """The same weight as kernels of linears take it."""
        if self.scale_factor is None:
            return self
        scale = self.plain_scale if self.plain_scale is not None else ("times_factor", self.scale, self.scale_factor)
        offset = self.offset if self.offset_factor is None else ("minus_times_factor", self.offset, self.offset_factor)
        return replace(self, scale=scale, offset=offset, scale_factor=None, offset_factor=None, plain_scale=None)

    @property
    def layout(self) -> Any:
        """As of `ScaledParts`."""
        functions = [(part[0], *(a for a in part if isinstance(a, Text))) for part in (self.codes, self.offset) if isinstance(part, tuple)]
        # Without a table or zero points, the bits say what is subtracted from codes.
        zero_point = None if self.table or self.offset is not None else self.bits
        parts = (self.offset is not None, self.input_groups is not None, self.scale_factor is not None, zero_point)
        return self.container_bits, self.group_size, *functions, self.table, *parts, self.activations

    def plain(self, dtype: torch.dtype) -> Expression:
        """As of `ScaledParts`."""
        one, others = self.without_factors(), (self.bits, self.group_size, dtype, self.input_groups, Text(self.table))
        return ("dequantize_groups", one.codes, one.scale, one.offset, *others)

    def slow_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """As of `ScaledParts`."""
        return group_linear_unsupported_reason(device=device, dtype=dtype, group_size=self.group_size, table=self.table)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4Parts:
    """MXFP4 (`custom_ops/quantized/mxfp4.py`) for `cas::experts`. codes: uint8 [X, O, I / 32, 16]. scale: uint8 [X, O, I / 32]."""

    codes: Expression
    scale: Expression

    @property
    def layout(self) -> Any:
        """As of `ScaledParts`."""
        return "mxfp4"

    def plain(self, dtype: torch.dtype) -> Expression:
        """As of `ScaledParts`."""
        return ("dequantize_mxfp4", self.codes, self.scale, dtype)

    def slow_reason(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """As of `ScaledParts`; `quantize_experts` skips itself without a kernel, and says so."""
        return None


Parts = ScaledParts | GroupedParts | Mxfp4Parts


class StoredWeight(Protocol):
    """A parameter as a checkpoint holds it. Its parts and its plain value are expressions of weight functions over its tensors."""

    @property
    def tensors(self) -> Sequence[StoredTensor]:
        """What the checkpoint must hold for it."""
        ...

    @property
    def unused(self) -> Sequence[str]:
        """Names of further tensors of it that the checkpoint may hold."""
        ...

    @property
    def is_quantized(self) -> bool:
        """Whether the tensors have less precision than the parameter, so that they must not be rounded again."""
        ...

    @property
    def parts(self) -> Parts | None:
        """What kernels take; None: no kernel takes it as it is stored."""
        ...

    def plain(self, dtype: torch.dtype) -> Expression:
        """The parameter in `dtype`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """A `StoredWeight` that kernels take."""

    parts: Parts
    tensors: tuple[StoredTensor, ...]
    unused: tuple[str, ...] = ()
    is_quantized: bool = field(default=True, init=False)

    def plain(self, dtype: torch.dtype) -> Expression:
        return self.parts.plain(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class DequantizedWeight:
    """A `StoredWeight` that no kernel takes as it is stored. of_dtype: dtype → the parameter in it."""

    of_dtype: Callable[[torch.dtype], Expression]
    tensors: tuple[StoredTensor, ...]
    unused: tuple[str, ...] = ()
    is_quantized: bool = field(default=True, init=False)
    parts: Parts | None = field(default=None, init=False)

    def plain(self, dtype: torch.dtype) -> Expression:
        return self.of_dtype(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangedWeight:
    """A `StoredWeight` that is not quantized, and that the checkpoint holds in another order of its elements, or in another shape."""

    value: Expression
    tensors: tuple[StoredTensor, ...]
    unused: tuple[str, ...] = ()
    is_quantized: bool = field(default=False, init=False)
    parts: Parts | None = field(default=None, init=False)

    def plain(self, dtype: torch.dtype) -> Expression:
        return self.value


def scaled_weight(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    scale: str,
    scale_of: Literal["tensor", "row", "block"],
    activations: Activations = "none",
    input_scale: str | None = None,
    scale_function: str = "scale_to_rows",
    scale_divisor: float = 1.0,
    scale_parts: Mapping[str, TensorPart] | None = None,
    unused: tuple[str, ...] = (),
) -> QuantizedWeight:
    """A weight of 8-bit values and float scales.

    name, shape: of the values in the checkpoint, [O, I], or of experts [X, O, I]. scale: name of the scales. scale_of: what has one: a
    matrix (of experts: each of the P matrices that `scale_parts` says), an output, or a block of 128 × 128. input_scale: name of the scale
    of "static" activations, one value. scale_function: makes the scale of each row. scale_divisor: the stored scales are this many times
    the scale of a value. scale_parts: of stacked scales, as in `StoredTensor`.
    """
    *experts, outputs, inputs = shape
    scale_shape = {
        "tensor": (*experts, len({part.first_row for part in (scale_parts or {}).values()}), 1) if experts else (1,),
        "row": (*experts, outputs, 1),
        "block": (*experts, -(-outputs // BLOCK), -(-inputs // BLOCK)),
    }[scale_of]
    values_std = _values_std(dtype) / scale_divisor
    tensors = [
        StoredTensor(name=name, shape=tuple(shape), dtype=dtype, fill=bell_curve),
        StoredTensor(
            name=scale,
            shape=scale_shape,
            dtype=torch.float32,
            fill=around(lambda std: std / values_std),
            weight_power=1,
            stacked_from=scale_parts or {},
        ),
    ]
    if input_scale is not None:
        tensors.append(StoredTensor(name=input_scale, shape=(1,), dtype=torch.float32, fill=_ones, input_power=1))
    parts = ScaledParts(
        values=name,
        scale=scale if scale_of == "block" else (scale_function, scale, name),
        dtype=dtype,
        per_block=scale_of == "block",
        activations=activations,
        input_scale=input_scale,
    )
    return QuantizedWeight(parts=parts, tensors=tuple(tensors), unused=unused)


def _ones(tensor: torch.Tensor, std: float, generator: torch.Generator) -> object:
    return tensor.fill_(1.0)


@weight_function("scale_to_rows")
def scale_to_rows(scale: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """A checkpoint's scale of equal parts of a matrix's rows ([1], [O, 1]; of experts [X, P, 1]) as a scale per row.

    → float32 [O] or [X, O]
    """
    *experts, rows = quantized.shape[:-1]
    of_parts = scale.float().reshape(*experts, -1)
    return of_parts.repeat_interleave(rows // of_parts.shape[-1], -1)
