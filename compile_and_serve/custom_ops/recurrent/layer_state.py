"""What layers with recurrent ops keep of a sequence: a checkpoint, and a ring of what the tokens since then contributed.

Shape legend: H value heads, G key heads (H % G == 0), K key size, V value size, D channels of a convolution, W its width, R ring entries.

The checkpoint is the state at a multiple of 16 tokens. It is replaced only by tokens that can no longer be taken back, so a rejected draft,
a preemption and a prefix hit need nothing but the number of tokens at which a step begins. A decode reads the checkpoint once and writes
one entry, in place of reading and writing the whole state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compile_and_serve.custom_ops.mesh import ColwisePart, Mesh
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState, StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent

RECURRENT_STATES = "recurrent_states"  # the state group of recurrent layers, and the argument of a model's `forward`
CHECKPOINT_TOKENS = 16  # a checkpoint lies at a multiple of these
ROLLBACK_TOKENS = 15
# A step of up to ROLLBACK_TOKENS + 1 tokens may write its entries while other programs still read those of earlier tokens, so the tokens
# from the old checkpoint to the step's last one need places of their own.
RING_TOKENS = 2 * ROLLBACK_TOKENS + CHECKPOINT_TOKENS + 1 + 1
SCAN_RING_TOKENS = ROLLBACK_TOKENS + CHECKPOINT_TOKENS + 1  # nobody else reads the entries of a block of a selective scan
StatePart = tuple[torch.Tensor, torch.Tensor]  # a tensor of the state, and the columns of a slot that hold it
_CHANNELS = 128  # of a convolution that lie in one page


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionState(LayerState):
    """A short convolution's last inputs, [R, ≤128] per block of channels. dtype: of the inputs.

    parts: how ranks share the channels. A block lies within a unit of a part. None: every rank keeps them whole.
    """

    channels: int
    width: int
    dtype: torch.dtype
    parts: tuple[ColwisePart, ...] | None = None

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        block = math.gcd(self.channels, _CHANNELS, *(part.rows // part.units for part in self.parts or ()))
        return (StateTensor(shape=(self.channels // block, ROLLBACK_TOKENS + self.width - 1, block), dtype=self.dtype),)

    def of_rank(self, mesh: Mesh) -> ConvolutionState:
        if self.parts is None:
            return self
        parts = tuple(
            ColwisePart(max(1, part.units // mesh.tensor) * part.rows // part.units, max(1, part.units // mesh.tensor))
            for part in self.parts
        )
        return replace(self, channels=sum(part.rows for part in parts), parts=parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearAttentionState(LayerState):
    """The state of linear attention: checkpoint (H, K, V), keys (G, R, K), values (H, R + 1, V), decays (H, R, 1 or K).

    The token at position p has the entry p % R. Row R of the values is the checkpoint's position, in every column. A checkpoint at
    position 0 is zero, whatever lies there. dtype: of the keys. Values and decays are in float32. is_sharded: ranks share the heads.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    decay_per_channel: bool = False
    is_sharded: bool = False

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        decays = self.key_dim if self.decay_per_channel else 1
        return (
            StateTensor(shape=(self.num_heads, self.key_dim, self.value_dim)),
            StateTensor(shape=(self.num_key_heads, RING_TOKENS, self.key_dim), dtype=self.dtype),
            StateTensor(shape=(self.num_heads, RING_TOKENS + 1, self.value_dim), dtype=torch.float32),
            StateTensor(shape=(self.num_heads, RING_TOKENS, decays), dtype=torch.float32),
        )

    def of_rank(self, mesh: Mesh) -> LinearAttentionState:
        """One rank's share of the heads, or one key head that several ranks keep."""
        if not self.is_sharded:
            return self
        heads, key_heads = (max(1, count // mesh.tensor) for count in (self.num_heads, self.num_key_heads))
        return replace(self, num_heads=heads, num_key_heads=key_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveScanState(LayerState):
    """The state of a selective scan, per block of C ≤ 128 channels: states (2, N, C), inputs (R, 2, C), keys (R, N), positions (2).

    The two states are the checkpoint, and a later one from which a decode goes on, since a replay of entries takes as long as their tokens
    took. The inputs are dt, before its activation, and x; the keys are B. positions: of the two states; a later state at -1 is none.
    dtype: of inputs and keys. Nothing is shared by blocks. part: how ranks share the channels; None: every rank keeps them whole.
    """

    channels: int
    state_size: int
    dtype: torch.dtype
    part: ColwisePart | None = None

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        block = math.gcd(self.channels, _CHANNELS, 0 if self.part is None else self.part.rows // self.part.units)
        blocks = self.channels // block
        return (
            StateTensor(shape=(blocks, 2, self.state_size, block)),
            StateTensor(shape=(blocks, SCAN_RING_TOKENS, 2, block), dtype=self.dtype),
            StateTensor(shape=(blocks, SCAN_RING_TOKENS, self.state_size), dtype=self.dtype),
            StateTensor(shape=(blocks, 2), dtype=torch.float32),
        )

    def of_rank(self, mesh: Mesh) -> SelectiveScanState:
        if self.part is None:
            return self
        part = ColwisePart(self.part.rows // mesh.tensor, self.part.units // mesh.tensor)
        return replace(self, channels=part.rows, part=part)


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinedState(LayerState):
    """The tensors of several ops of one layer, in their order."""

    parts: tuple[LayerState, ...]

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return tuple([one for part in self.parts for one in part.tensors(tokens_per_page, cache_dtype)])

    def of_rank(self, mesh: Mesh) -> JoinedState:
        return replace(self, parts=tuple(part.of_rank(mesh) for part in self.parts))


def recurrent_group(layers: Sequence[LayerState]) -> StateGroup:
    """The state of a model's recurrent layers; the argument `recurrent_states` of its `forward`."""
    return StateGroup(name=RECURRENT_STATES, layers=tuple(layers), kind=Recurrent(snapshots=True, rollback_tokens=ROLLBACK_TOKENS))


def checkpoint_after(num_computed: int, num_tokens: int, ring_tokens: int) -> int:
    """Where the checkpoint lies after a step from `num_computed` to `num_tokens` tokens."""
    rollback = (ring_tokens - CHECKPOINT_TOKENS - 1) // 2
    return max(num_computed, num_tokens - rollback) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS


def checkpoint_before(stored: float, num_computed: int, ring_tokens: int) -> int:
    """Where the checkpoint lies that a step at `num_computed` tokens reads. stored: the state's own word, which is random in examples."""
    latest = num_computed // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS
    earliest = -(-(num_computed - ring_tokens + 1) // CHECKPOINT_TOKENS) * CHECKPOINT_TOKENS
    return min(max(int(stored) // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS, earliest, 0), latest)
