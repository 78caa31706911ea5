"""Mamba (arXiv:2312.00752) and Falcon-Mamba, whose mixers normalize dt, B and C.

Shape legend: T tokens of the step, D hidden size, I inner size, N size of a channel's state, R rank of dt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.mesh import ColwiseParts
from compile_and_serve.custom_ops.recurrent.layer_state import ConvolutionState, JoinedState, SelectiveScanState, StatePart
from compile_and_serve.custom_ops.recurrent.selective_scan import selective_scan
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError, positive_int
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.mamba2 import MAX_LENGTH, FinalNorm, Mamba2Layer
from compile_and_serve.models.hybrid import HybridConfig, LayerKind, hybrid_spec
from compile_and_serve.models.recurrent_layers import causal_conv1d, convolve, convolved_channels
from compile_and_serve.models.spec import ModelSpec, ShardedModule, ShardStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaConfig:
    """Sizes of a Mamba mixer. norms: of dt, B and C: none, without weights, or with them. norm_eps: theirs."""

    hidden_size: int
    inner_size: int
    state_size: int
    rank: int
    width: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norms: Literal["none", "plain", "weighted"] = "none"
    norm_eps: float = 1e-6

    def state(self, dtype: torch.dtype) -> LayerState:
        """What a layer keeps. dtype: of the model."""
        size, [part] = self.inner_size, convolved_channels(self.inner_size)
        convolution = ConvolutionState(channels=size, width=self.width, dtype=dtype, parts=(part,))
        return JoinedState(parts=(convolution, SelectiveScanState(channels=size, state_size=self.state_size, dtype=dtype, part=part)))


def dt_rank(config: Mapping[str, Any], name: str, hidden_size: int) -> int:
    """config.json's rank of dt. "auto" is one for 16 features."""
    return math.ceil(hidden_size / 16) if config.get(name, "auto") == "auto" else positive_int(config, name)


class MambaMixer(ShardedModule):
    """Mamba. [T, D] → [T, D]"""

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        self.config = config
        inner, size = config.inner_size, config.state_size
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=config.has_bias)
        self.conv1d = causal_conv1d(inner, config.width, bias=config.has_conv_bias)
        self.x_proj = nn.Linear(inner, config.rank + 2 * size, bias=False)
        self.dt_proj = nn.Linear(config.rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, size))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=config.has_bias)
        if config.norms != "none":
            norm = partial(nn.RMSNorm, eps=config.norm_eps, elementwise_affine=config.norms == "weighted")
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = norm(config.rank), norm(size), norm(size)

    def tp_plan(self) -> Mapping[str, ShardStyle | ColwiseParts]:
        [part] = convolved_channels(self.config.inner_size)
        parts = {"in_proj": ColwiseParts((part, part)), "dt_proj": ColwiseParts((part,))}
        return {**parts, "x_proj": "rowwise", "out_proj": "rowwise"}

    def forward(self, x_TD: torch.Tensor, state: Sequence[StatePart]) -> torch.Tensor:
        config = self.config
        x_TI, gate_TI = self.in_proj(x_TD).chunk(2, dim=-1)
        x_TI = F.silu(convolve(self.conv1d, x_TI, state[0]))
        dt_TR, b_TN, c_TN = self.x_proj(x_TI).split((config.rank, config.state_size, config.state_size), dim=-1)
        if config.norms != "none":
            dt_TR, b_TN, c_TN = self.dt_layernorm(dt_TR), self.b_layernorm(b_TN), self.c_layernorm(c_TN)
        out_TI = selective_scan(x_TI, self.dt_proj(dt_TR), -self.A_log.float().exp(), b_TN, c_TN, state[1:])
        out_TI = (out_TI.float() + self.D.float() * x_TI.float()) * F.silu(gate_TI.float())
        return self.out_proj(out_TI.to(x_TD.dtype))


def _build(config: Mapping[str, Any], dtype: torch.dtype, norms: Literal["none", "plain"]) -> ModelSpec:
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfigError(f"hidden_act must be 'silu', got {config['hidden_act']!r}.")
    eps = float(config.get("layer_norm_epsilon", 1e-5))
    known = {"num_attention_heads": 1, "max_position_embeddings": MAX_LENGTH, "rms_norm_eps": eps, "tie_word_embeddings": True}
    decoder = DecoderConfig.from_dict({**known, **config, "intermediate_size": 1})
    size = decoder.hidden_size
    mixer = MambaConfig(
        hidden_size=size,
        inner_size=positive_int(config, "intermediate_size", int(float(config.get("expand", 2)) * size)),
        state_size=positive_int(config, "state_size", 16),
        rank=dt_rank(config, "time_step_rank", size),
        width=positive_int(config, "conv_kernel", 4),
        has_bias=bool(config.get("use_bias", False)),
        has_conv_bias=bool(config.get("use_conv_bias", True)),
        norms=norms,
        norm_eps=float(config.get("mixer_rms_eps", 1e-6)),
    )
    wide = bool(config.get("residual_in_fp32", True))
    every: LayerKind = "recurrent"
    hybrid = HybridConfig(
        decoder=decoder,
        kinds=(every,) * decoder.num_hidden_layers,
        norm=partial(FinalNorm, size, eps, dtype),
        has_rope=False,
        norm_name="norm_f",
    )
    names = {"model.embed_tokens": "model.embeddings", "model.": "backbone."}

    def make_layer(number: int) -> nn.Module:
        return Mamba2Layer(MambaMixer(mixer), size, eps, dtype, wide_residual=wide)

    return hybrid_spec(hybrid, make_layer, mixer.state(dtype), config, dtype, names=names)


def build_mamba(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, "none")


def build_falcon_mamba(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return _build(config, dtype, "plain")


register_model("MambaForCausalLM", build_mamba, features=("Mamba",))
register_model("FalconMambaForCausalLM", build_falcon_mamba, features=("Mamba",))
