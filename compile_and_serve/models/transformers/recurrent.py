"""Recurrent mixers of the transformers package's classes: the functions that they call become our ops.

A mixer is recognized by the names of the functions that its `forward` calls (`_FUNCTIONS`); each modeling file has its own copies of them.
In a mixer of a model here they run our ops on the mixer's state, everywhere else they are transformers' own.

Shape legend: T tokens of the step, C channels of a convolution, W its width, G key heads, H value heads, K key size, V value size,
I channels of a scan, N size of a channel's state.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.recurrent.layer_state import (
    RECURRENT_STATES,
    ConvolutionState,
    JoinedState,
    LinearAttentionState,
    SelectiveScanState,
    StatePart,
    recurrent_group,
)
from compile_and_serve.custom_ops.recurrent.linear_attention import linear_attention
from compile_and_serve.custom_ops.recurrent.selective_scan import selective_scan
from compile_and_serve.custom_ops.recurrent.short_convolution import short_convolution
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState
from compile_and_serve.models.recurrent_layers import unit_length
from compile_and_serve.models.transformers.attention import RunningForward, Unsupported

_STATELESS_LAYERS = ("mlp", "moe")  # in a config's layer types


class _Active:
    """The mixer that runs, and how many functions it has called."""

    def __init__(self) -> None:
        self.mixer: Any = None
        self.num_calls = 0


_ACTIVE = _Active()


class Mixers:
    """The mixers of a model, and what each of their calls keeps, which a dry run finds out."""

    def __init__(self, model: nn.Module) -> None:
        self.states: dict[nn.Module, list[LayerState]] = {}
        for module in model.modules():
            if not (names := _functions_of(type(module))):
                continue
            file = sys.modules[type(module).__module__]
            for name in names:
                function = getattr(file, name)
                if not hasattr(function, "cas_original"):
                    setattr(file, name, _switched(function, _FUNCTIONS[name]))
            mixer: Any = module
            if type(module).__name__ == "ZambaMambaMixer":
                mixer.forward = partial(_zamba, mixer)
            mixer.forward = partial(_mixer_forward, mixer, mixer.forward)
            mixer.cas_states = self.states[mixer] = []
            mixer.counts_calls = True  # tells the capture not to reuse a block's trace

    def group(self) -> StateGroup | None:
        """The state of all mixers, in which each gets its place. None: there are none. Raises `Unsupported`."""
        layers = []
        for number, (mixer, states) in enumerate(self.states.items()):
            if not states:
                raise Unsupported(f"its {type(mixer).__name__} does not run in a forward")
            mixer.cas_layer = number  # type: ignore[assignment]
            mixer.cas_sizes = [len(one.tensors(1, torch.float32)) for one in states]  # type: ignore[assignment]
            layers.append(states[0] if len(states) == 1 else JoinedState(parts=tuple(states)))
        return recurrent_group(layers) if layers else None

    def num_layers(self, config: Any) -> int:
        """The number of a model's layers that must have attention or a mixer."""
        kinds = getattr(config, "layer_types", None) if self.states else None
        return sum(kind not in _STATELESS_LAYERS for kind in kinds) if kinds else int(config.num_hidden_layers)


def _functions_of(cls: type) -> list[str]:
    """The functions known here that a class's `forward` calls."""
    forward = inspect.unwrap(cls.forward) if hasattr(cls, "forward") else None
    code = getattr(forward, "__code__", None)
    return [name for name in _FUNCTIONS if code is not None and name in code.co_names]


def _switched(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` in a mixer of a model here, else `original`."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if _ACTIVE.mixer is None else ours(*args, **kwargs)

    function.cas_original = original  # type: ignore[attr-defined]
    return function


def _mixer_forward(mixer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _ACTIVE.mixer, _ACTIVE.num_calls = mixer, 0
    out = forward(*args, **kwargs)
    _ACTIVE.mixer = None
    return out


def no_mixer_runs() -> None:
    """After a forward that raised."""
    _ACTIVE.mixer = None


def _state(make: Callable[[], LayerState]) -> Any:
    """The state of the running call: a part, or several. None in a dry run, which records what `make` says that the call keeps."""
    mixer, number = _ACTIVE.mixer, _ACTIVE.num_calls
    _ACTIVE.num_calls += 1
    running: RunningForward = mixer.cas_running
    if running.dry_run is not None:
        if len(mixer.cas_states) > number and not running.dry_run.again:
            raise Unsupported(f"its {type(mixer).__name__} runs twice in a forward")
        if len(mixer.cas_states) == number:
            mixer.cas_states.append(make())
        return None
    kept = running.caches[RECURRENT_STATES][mixer.cas_layer]
    sizes = mixer.cas_sizes
    if sum(sizes) == 1:
        return kept
    first = sum(sizes[:number])
    return kept[first] if sizes[number] == 1 else kept[first : first + sizes[number]]


def _no_state_given(given: Any) -> None:
    if given is not None:
        raise Unsupported("a mixer begins with a state of its own")


def _convolution(
    x_1CT: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None, **_: Any
) -> torch.Tensor:
    """→ [1, C, T]"""
    if activation not in (None, "silu", "swish"):
        raise Unsupported(f"the activation of its convolutions is {activation!r}")
    state: StatePart | None = _state(lambda: ConvolutionState(channels=weight.shape[0], width=weight.shape[1], dtype=x_1CT.dtype))
    if state is None:
        return torch.empty_like(x_1CT)
    out_TC = short_convolution(x_1CT[0].T.contiguous(), weight, bias, state)
    return (out_TC if activation is None else F.silu(out_TC)).T[None]


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """g: [1, T, H], or [1, T, H, K] for a decay per channel. → [1, T, H, V]"""
    _no_state_given(initial_state)
    q_TGK, k_TGK, v_THV = query[0], key[0], value[0]
    state = _state(
        lambda: LinearAttentionState(
            num_heads=v_THV.shape[1],
            num_key_heads=k_TGK.shape[1],
            key_dim=k_TGK.shape[2],
            value_dim=v_THV.shape[2],
            dtype=k_TGK.dtype,
            decay_per_channel=g.dim() == 4,
        )
    )
    if state is None:
        return torch.empty_like(value), None
    scale = q_TGK.shape[2] ** -0.5
    if use_qk_l2norm_in_kernel:
        q_TGK, k_TGK = unit_length(q_TGK, scale), unit_length(k_TGK)
    else:
        q_TGK = q_TGK * scale
    log_decay, beta_TH = g[0].float().contiguous(), beta[0].float().contiguous()
    return linear_attention(q_TGK.contiguous(), k_TGK.contiguous(), v_THV.contiguous(), log_decay, beta_TH, state)[None], None


def _ssd(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **_: Any,
) -> torch.Tensor:
    """Mamba-2's scan. hidden_states: [1, T, H, V]; dt: [1, T, H]; B, C: [1, T, G, K]. → [1, T, H, V]"""
    _no_state_given(initial_states)
    if z is not None:
        raise Unsupported("its scans apply a gate")
    x_THV, b_TGK, c_TGK = hidden_states[0], B[0], C[0]
    state = _state(
        lambda: LinearAttentionState(
            num_heads=x_THV.shape[1], num_key_heads=b_TGK.shape[1], key_dim=b_TGK.shape[2], value_dim=x_THV.shape[2], dtype=b_TGK.dtype
        )
    )
    if state is None:
        return torch.empty_like(hidden_states)
    dt_TH = dt[0].float() if dt_bias is None else dt[0].float() + dt_bias.float()
    dt_TH = F.softplus(dt_TH) if dt_softplus else dt_TH
    if tuple(dt_limit) != (0.0, math.inf):
        dt_TH = dt_TH.clamp(*dt_limit)
    scaled_THV = (x_THV.float() * dt_TH[:, :, None]).to(x_THV.dtype)
    out_THV = linear_attention(c_TGK.contiguous(), b_TGK.contiguous(), scaled_THV, A.float() * dt_TH, None, state)
    if D is not None:
        out_THV = (out_THV.float() + D.float()[:, None] * x_THV.float()).to(x_THV.dtype)
    return out_THV[None]


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Mamba's scan. hidden_states, dt, z: [1, I, T]; A: [I, N]; B, C: [1, N, T]. → [1, I, T]"""
    if not delta_softplus:
        raise Unsupported("its scans take dt without softplus")
    x_TI = hidden_states[0].T
    state = _state(lambda: SelectiveScanState(channels=x_TI.shape[1], state_size=A.shape[1], dtype=x_TI.dtype))
    if state is None:
        return torch.empty_like(hidden_states)
    dt_TI = dt[0].T if delta_bias is None else dt[0].T + delta_bias.to(dt.dtype)
    x_TI, dt_TI, b_TN, c_TN = (part.contiguous() for part in (x_TI, dt_TI.to(x_TI.dtype), B[0].T, C[0].T))
    out_TI = selective_scan(x_TI, dt_TI, A.float().contiguous(), b_TN, c_TN, state).float()
    if D is not None:
        out_TI = out_TI + D.float() * x_TI.float()
    if z is not None:
        out_TI = out_TI * F.silu(z[0].T.float())
    return out_TI.to(x_TI.dtype).T[None]


def _zamba(mixer: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """As the original, with a linear for each head: Inductor does not compile products of stacked weights with tokens as columns."""
    x_TI, gate_TI = mixer.in_proj(hidden_states)[0].unflatten(-1, (-1, 2)).unbind(-1)
    weight = mixer.conv1d.weight.squeeze(1)
    x_TI = _convolution(x_TI.T[None], weight, mixer.conv1d.bias, mixer.activation)[0].T
    sizes = mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size
    outs = []
    for head, x_TV in enumerate(x_TI.split(mixer.mamba_head_dim, dim=-1)):
        dt_TR, b_TN, c_TN = F.linear(x_TV, mixer.x_proj_weight[head]).split(sizes, dim=-1)
        dt_TV = F.linear(dt_TR, mixer.dt_proj_weight[head])
        rates = -mixer.A_log[head].float().exp()
        columns = slice(head * mixer.mamba_head_dim, (head + 1) * mixer.mamba_head_dim)
        given = (x_TV.T[None], dt_TV.T[None], rates, b_TN.T[None], c_TN.T[None], mixer.D[head], gate_TI[:, columns].T[None])
        outs.append(_scan(*given, mixer.dt_proj_bias[head].float(), delta_softplus=True)[0].T)
    return mixer.out_proj(torch.cat(outs, dim=-1)[None].to(hidden_states.dtype))


_FUNCTIONS: dict[str, Callable[..., Any]] = {  # transformers' functions → what runs in their place
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _ssd,
    "mamba_selective_scan": _scan,
}
