"""Token mixers with recurrent state, which families share: Gated DeltaNet, Mamba-2 and the gated short convolution.

Shape legend: T tokens of the step, D hidden size, H value heads, G key heads or groups, K key size, V value size, C channels of the
convolution.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.mesh import ColwisePart, ColwiseParts
from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState, JoinedState, LinearAttentionState, StatePart
from compile_and_serve.custom_ops.recurrent.linear_attention import linear_attention
from compile_and_serve.custom_ops.recurrent.short_convolution import short_convolution
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.models.config import ModelConfigError, positive_int
from compile_and_serve.models.spec import ShardedModule, ShardStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNetConfig:
    """Sizes of a Gated DeltaNet. decay_per_channel: of the key, as in Kimi Delta Attention."""

    hidden_size: int
    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float
    decay_per_channel: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DeltaNetConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        made = cls(
            hidden_size=positive_int(config, "hidden_size"),
            num_key_heads=positive_int(config, "linear_num_key_heads", 16),
            num_heads=positive_int(config, "linear_num_value_heads", 32),
            key_dim=positive_int(config, "linear_key_head_dim", 128),
            value_dim=positive_int(config, "linear_value_head_dim", 128),
            width=positive_int(config, "linear_conv_kernel_dim", 4),
            eps=float(config.get("rms_norm_eps", 1e-6)),
        )
        if made.num_heads % made.num_key_heads:
            raise ModelConfigError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads, got {made.num_heads} and {made.num_key_heads}."
            )
        return made

    @property
    def keys_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def convolved_parts(self) -> tuple[ColwisePart, ...]:
        """Queries, keys and values: what ranks share of the convolution."""
        keys = ColwisePart(self.keys_size, self.num_key_heads, shared_by_ranks=True)
        return keys, keys, ColwisePart(self.values_size, self.num_heads)

    def state(self, dtype: torch.dtype) -> LayerState:
        """What a layer keeps. dtype: of the model."""
        channels = 2 * self.keys_size + self.values_size
        convolution = ConvolutionState(channels=channels, width=self.width, dtype=dtype, parts=self.convolved_parts)
        memory = LinearAttentionState(
            num_heads=self.num_heads,
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            is_sharded=True,
            decay_per_channel=self.decay_per_channel,
        )
        return JoinedState(parts=(convolution, memory))


class GatedNorm(nn.Module):
    """RMSNorm of each head, times activation(gate), in float32."""

    def __init__(self, size: int, eps: float, activation: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.activation = eps, activation

    def forward(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        wide = x_THV.float()
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x_THV.dtype)
        return (self.weight * normed * self.activation(gate_THV.float())).to(x_THV.dtype)


def causal_conv1d(channels: int, width: int, *, bias: bool) -> nn.Conv1d:
    """Holds the parameters of a short convolution, as checkpoints do: weight [C, 1, W]."""
    return nn.Conv1d(channels, channels, width, groups=channels, bias=bias)


class SplitConvolution(nn.Module):
    """The convolution of queries, keys and values, of each of which checkpoints have the weight. sizes: their channels."""

    bias = None

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (causal_conv1d(size, width, bias=False) for size in sizes)

    @property
    def weight(self) -> torch.Tensor:
        return torch.cat((self.q_conv1d.weight, self.k_conv1d.weight, self.v_conv1d.weight))


def convolve(conv: nn.Conv1d | SplitConvolution, x_TC: torch.Tensor, state: StatePart) -> torch.Tensor:
    return short_convolution(x_TC, conv.weight.squeeze(1), conv.bias, state)


def unit_length(x_TGK: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Each vector, divided by its length and multiplied by `scale`."""
    wide = x_TGK.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6) * scale).to(x_TGK.dtype)


class GatedDeltaNet(ShardedModule):
    """Gated DeltaNet (arXiv:2412.06464). [T, D] → [T, D]. Subclasses make the projections, and `project` from the input.

    beta_scale: a factor of beta.
    """

    conv1d: nn.Conv1d | SplitConvolution

    def __init__(self, config: DeltaNetConfig, beta_scale: float = 1.0) -> None:
        super().__init__()
        self.config, self.beta_scale = config, beta_scale
        self.conv1d = causal_conv1d(2 * config.keys_size + config.values_size, config.width, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.norm = GatedNorm(config.value_dim, config.eps)
        self.out_proj = nn.Linear(config.values_size, config.hidden_size, bias=False)

    @abstractmethod
    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """→ queries, keys and values side by side [T, C]; the output's gate [T, H · V]; beta and the decay [T, H], not activated"""

    def forward(self, x_TD: torch.Tensor, state: Sequence[StatePart]) -> torch.Tensor:
        config = self.config
        qkv_TC, gate, b_TH, a_TH = self.project(x_TD)
        parts = convolve(self.conv1d, qkv_TC, state[0]).split((config.keys_size, config.keys_size, config.values_size), dim=-1)
        q, k, v = (F.silu(part) for part in parts)  # one by one, so that none is a part of a larger tensor
        q_TGK = unit_length(q.unflatten(-1, (-1, config.key_dim)), config.key_dim**-0.5)
        k_TGK = unit_length(k.unflatten(-1, (-1, config.key_dim)))
        v_THV = v.unflatten(-1, (-1, config.value_dim))
        log_decay_TH = -self.A_log.float().exp() * F.softplus(a_TH.float() + self.dt_bias)
        beta_TH = b_TH.sigmoid().float()
        if self.beta_scale != 1.0:
            beta_TH = beta_TH * self.beta_scale
        out_THV = linear_attention(q_TGK, k_TGK, v_THV, log_decay_TH, beta_TH, state[1:])
        return self.out_proj(self.norm(out_THV, gate.unflatten(-1, (-1, config.value_dim))).flatten(1))


class SplitProjectionDeltaNet(GatedDeltaNet):
    """With a projection each (Qwen3.5)."""

    def __init__(self, config: DeltaNetConfig) -> None:
        super().__init__(config)
        self.in_proj_qkv = nn.Linear(config.hidden_size, 2 * config.keys_size + config.values_size, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, config.values_size, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, config.num_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, config.num_heads, bias=False)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        values = ColwiseParts((ColwisePart(self.config.values_size, self.config.num_heads),))
        return {
            "in_proj_qkv": ColwiseParts(self.config.convolved_parts),
            "in_proj_z": values,
            "in_proj_b": "colwise",
            "in_proj_a": "colwise",
            "out_proj": "rowwise",
        }

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.in_proj_qkv(x_TD), self.in_proj_z(x_TD), self.in_proj_b(x_TD), self.in_proj_a(x_TD)


class GroupedProjectionDeltaNet(GatedDeltaNet):
    """With two projections, whose outputs lie key head by key head (Qwen3-Next)."""

    def __init__(self, config: DeltaNetConfig) -> None:
        super().__init__(config)
        self.in_proj_qkvz = nn.Linear(config.hidden_size, 2 * config.keys_size + 2 * config.values_size, bias=False)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * config.num_heads, bias=False)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        return {"in_proj_qkvz": "colwise", "in_proj_ba": "colwise", "out_proj": "rowwise"}

    def project(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        config, num_tokens = self.config, x_TD.shape[0]
        heads = config.num_heads // config.num_key_heads  # of a key head
        values = heads * config.value_dim
        by_head = self.in_proj_qkvz(x_TD).view(num_tokens, -1, 2 * config.key_dim + 2 * values)
        q, k, v, z = by_head.split((config.key_dim, config.key_dim, values, values), dim=-1)
        b, a = self.in_proj_ba(x_TD).view(num_tokens, -1, 2 * heads).split((heads, heads), dim=-1)
        flat = [part.contiguous().view(num_tokens, -1) for part in (q, k, v, z, b, a)]
        return torch.cat(flat[:3], dim=-1), flat[3], flat[4], flat[5]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config:
    """Sizes of a Mamba-2 mixer.

    norm_groups: of the features that the norm before the output projection takes together; 0: there is no norm, only the gate.
    gates_first: whether the gate is applied before that norm. time_limits: of dt.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    eps: float
    has_bias: bool = False
    has_conv_bias: bool = True
    norm_groups: int = 1
    gates_first: bool = True
    time_limits: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ModelConfigError(f"Mamba-2's heads must be a multiple of its groups, got {self.num_heads} and {self.num_groups}.")

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def groups_size(self) -> int:
        return self.num_groups * self.state_size

    @property
    def convolved_parts(self) -> tuple[ColwisePart, ...]:
        """x, B and C: what ranks share of the convolution. A group of the norm stays on one rank, if there are several."""
        units = self.norm_groups if self.norm_groups > 1 else self.num_heads
        groups = ColwisePart(self.groups_size, self.num_groups, shared_by_ranks=True)
        return ColwisePart(self.inner_size, units), groups, groups

    def state(self, dtype: torch.dtype) -> LayerState:
        """What a layer keeps. dtype: of the model."""
        channels = self.inner_size + 2 * self.groups_size
        convolution = ConvolutionState(channels=channels, width=self.width, dtype=dtype, parts=self.convolved_parts)
        memory = LinearAttentionState(
            num_heads=self.num_heads,
            num_key_heads=self.num_groups,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            dtype=dtype,
            is_sharded=True,
        )
        return JoinedState(parts=(convolution, memory))


def time_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """config.json's `time_step_limit`. transformers writes infinity as {"__float__": "Infinity"}."""
    limits = config.get("time_step_limit") or (0.0, math.inf)
    least, most = (float(one["__float__"] if isinstance(one, Mapping) else one) for one in limits)
    return least, most


class GatedGroupNorm(nn.Module):
    """RMSNorm of each group of features, with silu(gate) before or behind it, in float32."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.inner_size))
        self.group_size = config.inner_size // config.norm_groups if config.norm_groups > 1 else None
        self.eps, self.gates_first = config.eps, config.gates_first

    def forward(self, x_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        gate = F.silu(gate_TI.float())
        wide = x_TI * gate if self.gates_first else x_TI
        if self.group_size is not None:
            wide = wide.unflatten(-1, (-1, self.group_size))
        normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).flatten(1)
        normed = self.weight * normed
        return (normed if self.gates_first else normed * gate).to(gate_TI.dtype)


class Mamba2Mixer(ShardedModule):
    """Mamba-2 (arXiv:2405.21060). [T, D] → [T, D]

    multipliers: of the five parts of the projection: gate, x, B, C and dt (Falcon-H1).
    """

    def __init__(self, config: Mamba2Config, multipliers: Sequence[float] | None = None) -> None:
        super().__init__()
        self.config, self.multipliers = config, multipliers
        channels = config.inner_size + 2 * config.groups_size
        self.conv1d = causal_conv1d(channels, config.width, bias=config.has_conv_bias)
        self.in_proj = nn.Linear(config.hidden_size, config.inner_size + channels + config.num_heads, bias=config.has_bias)
        self.dt_bias = nn.Parameter(torch.empty(config.num_heads))
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.D = nn.Parameter(torch.empty(config.num_heads))
        self.norm = GatedGroupNorm(config) if config.norm_groups else None
        self.out_proj = nn.Linear(config.inner_size, config.hidden_size, bias=config.has_bias)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        x, b, c = self.config.convolved_parts
        parts = (x, x, b, c, ColwisePart(self.config.num_heads, x.units))
        return {"in_proj": ColwiseParts(parts), "out_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor, state: Sequence[StatePart]) -> torch.Tensor:
        config = self.config
        sizes = (config.inner_size, config.inner_size, config.groups_size, config.groups_size, config.num_heads)
        projected = self.in_proj(x_TD)
        if self.multipliers is not None:
            parts = zip(projected.split(sizes, dim=-1), self.multipliers, strict=True)
            projected = torch.cat([part * multiplier for part, multiplier in parts], dim=-1)
        gate, xbc_TC, dt_TH = projected.split((config.inner_size, sum(sizes[1:4]), config.num_heads), dim=-1)
        x, b, c = (F.silu(part) for part in convolve(self.conv1d, xbc_TC, state[0]).split(sizes[1:4], dim=-1))
        dt_TH = F.softplus(dt_TH.float() + self.dt_bias.float())
        if config.time_limits != (0.0, math.inf):
            dt_TH = dt_TH.clamp(*config.time_limits)
        x_THV = x.unflatten(-1, (-1, config.head_dim))
        b_TGK, c_TGK = (part.unflatten(-1, (-1, config.state_size)) for part in (b, c))
        scaled_THV = (x_THV.float() * dt_TH[:, :, None]).to(x_THV.dtype)
        out_THV = linear_attention(c_TGK, b_TGK, scaled_THV, -self.A_log.float().exp() * dt_TH, None, state[1:])
        out_TI = (out_THV.float() + self.D.float()[:, None] * x_THV.float()).flatten(1)
        if self.norm is not None:
            return self.out_proj(self.norm(out_TI, gate))
        return self.out_proj((out_TI * F.silu(gate.float())).to(gate.dtype))


def convolved_channels(channels: int) -> tuple[ColwisePart, ...]:
    """What ranks share of a convolution over channels without heads: blocks of 16 to 128 of them, at least 8 where there are as many."""
    return (ColwisePart(channels, channels // max(math.gcd(16, channels), math.gcd(128, channels // 8))),)


class GatedShortConvolution(ShardedModule):
    """out(c · conv(b · x)) of three projections b, c, x (LFM2). [T, D] → [T, D]"""

    def __init__(self, hidden_size: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.conv = causal_conv1d(hidden_size, width, bias=bias)
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=bias)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        [part] = convolved_channels(self.out_proj.out_features)
        return {"in_proj": ColwiseParts((part,) * 3), "out_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor, state: StatePart) -> torch.Tensor:
        b_TD, c_TD, y_TD = self.in_proj(x_TD).chunk(3, dim=-1)
        return self.out_proj(c_TD * convolve(self.conv, b_TD * y_TD, state))
