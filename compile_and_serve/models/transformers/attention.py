"""Attention of the transformers package's classes: the function that they call, and the dry run that finds out what they need.

A class runs once on the meta device. Each call of attention is recorded with its shapes, its arguments and its mask. A mask is
recognized by the function that defines it: causal, a sliding window or chunks; of models that pool also both ways, within a window or not.
Any other is refused. Then each call gets the state group and the cache that it uses; a call that attends both ways needs none.

Shape legend: T tokens of the step, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import ScoreFeature, StateKind
from compile_and_serve.custom_ops.state.tokens import ALL_TOKENS, KV_CACHES, WINDOW_CACHES, KVCacheSpec, TokenChunks, TokenWindow
from compile_and_serve.models.config import ModelConfigError

ATTENTION = "compile_and_serve"  # our names in transformers' registries of attention functions and masks
DRY_RUN = "compile_and_serve_dry_run"
_LONGEST_WINDOW = 1 << 17  # of attention both ways
DRY_TOKENS = 37  # no size of a model is likely to be equal
# What transformers' mask functions are called. `packed_sequence_mask_function` tells the sequences of a batch apart, which the step does.
_AND, _WINDOW = "and_masks.<locals>.and_mask", "sliding_window_overlay.<locals>.inner_mask"
_CHUNKS, _SEQUENCES = "chunked_overlay.<locals>.inner_mask", "packed_sequence_mask_function.<locals>.inner_mask"
_OR, _BLOCKS = "or_masks.<locals>.or_mask", "blockwise_overlay.<locals>.inner_mask"
# Keyword arguments that do not change what attention computes.
_NO_EFFECT = (
    "position_ids",
    "position_embeddings",
    "cache_position",
    "logits_to_keep",
    "sliding_window",
    "dropout",
    "softcap",
    "s_aux",
    "is_causal",
)


class Unsupported(Exception):
    """Why a class cannot run, as a clause."""


def unsupported(name: str, reason: object) -> ModelConfigError:
    """The error of a class that cannot run."""
    return ModelConfigError(
        f"{name} cannot run in the transformers package's implementation: {reason} (`compile-and-serve models` lists the native ones)."
    )


@dataclass(frozen=True, slots=True)
class Mask:
    """Which earlier tokens a token attends to: all, a window, or those of its chunk of `window` tokens.

    both_ways: tokens before and behind it, all of them or the next `window` on each side.
    """

    window: int | None = None
    chunked: bool = False
    both_ways: bool = False

    @property
    def kind(self) -> StateKind:
        """The kind of state that keeps them."""
        if self.window is None:
            return ALL_TOKENS
        return TokenChunks(size=self.window) if self.chunked else TokenWindow(size=self.window)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """One call of attention in a forward. Calls with equal `kind` share a state group."""

    module: nn.Module
    layer: KVCacheSpec
    mask: Mask
    scores: frozenset[ScoreFeature]

    @property
    def kind(self) -> tuple[KVCacheSpec, Mask, frozenset[ScoreFeature]]:
        """What the layers of a state group have in common."""
        return self.layer, self.mask, self.scores


class RunningForward:
    """What attention functions read of the forward that runs: its caches by group, its positions, and the number of calls so far."""

    def __init__(self) -> None:
        self.caches: Mapping[str, Any] = {}
        self.positions: torch.Tensor | None = None
        self.rope_lengths: torch.Tensor | None = None  # int64 [T]: `changing_rope.py`
        self.encoder_rows: tuple[torch.Tensor, torch.Tensor] | None = None  # [R, D], and which of them each token reads: int64 [T]
        self.sees_ahead = False  # tokens of an image attend to later ones of it: `models/vision/ahead.py`
        self.tokens_ahead: torch.Tensor | None = None  # int32 [T]
        self.num_calls = 0
        self.sites: list[tuple[str | None, int]] = []  # group and cache of each call; None and the window, both ways
        self.dry_run: DryRun | None = None


def attach(model: nn.Module, running: RunningForward) -> None:
    """Let every module of a model find the running forward."""
    for module in model.modules():
        module.cas_running = running  # type: ignore[assignment]


def attention_forward(
    module: nn.Module,
    q_1HTE: torch.Tensor,
    k_1KTE: torch.Tensor,
    v_1KTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    own_mask: Mask | None = None,
    position_bias: torch.Tensor | None = None,
    biases: Mapping[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls. → [1, T, H, E]

    alibi_slopes_H: of each head. own_mask: of a class that masks without transformers' functions, or besides them.
    position_bias: [H, R] of a module with `cas_columns`, as `relative.py` replaces it. biases: others, by their names in the op.
    """
    if position_bias is not None:
        biases = {"distance_bias_HR": position_bias}
    running: Any = module.cas_running
    if running.dry_run is not None:
        features: set[ScoreFeature] = {"alibi"} if alibi_slopes_H is not None else set()
        if running.sees_ahead:
            features |= {"ahead"}
        mask = running.dry_run.mask_of(type(module).__name__, attention_mask, own_mask)
        if biases and not (mask.both_ways and hasattr(module, "cas_columns")):
            raise Unsupported(f"{type(module).__name__} gives its attention biases, which no attention kernel here takes")
        return running.dry_run.record(module, q_1HTE, k_1KTE, v_1KTE, mask, features, kwargs), None
    if (site := getattr(module, "cas_site", None)) is None:  # the module attends several times in a forward
        site = running.sites[running.num_calls]
        running.num_calls += 1
    group, index = site
    scale = q_1HTE.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q_THE, k_TKE, v_TKE = q_1HTE.transpose(1, 2)[0], k_1KTE.transpose(1, 2)[0], v_1KTE.transpose(1, 2)[0]
    if group is None:
        options: dict[str, Any] = {"columns_F": module.cas_columns, **biases} if biases else {}
        return encoder_attention(q_THE, k_TKE, v_TKE, scale, window=index, **options)[None], None
    soft_cap = float(kwargs.get("softcap") or 0.0)
    cache = running.caches[group][index]
    out = attention(q_THE, k_TKE, v_TKE, cache, scale, group, soft_cap, kwargs.get("s_aux"), alibi_slopes_H, running.tokens_ahead)
    return out[None], None


AttentionInterface.register(ATTENTION, attention_forward)
AttentionInterface.register(DRY_RUN, attention_forward)


@dataclass(slots=True)
class DryRun:
    """Records the attention of a forward on the meta device. again: the forward ran before. pools: tokens may attend to later ones."""

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, Callable[..., Any]]] = field(default_factory=list)
    no_blocks: list[torch.Tensor] = field(default_factory=list)  # tensors of -1
    again: bool = False
    pools: bool = False

    def make_mask(
        self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any
    ) -> torch.Tensor:
        """The mask that transformers asks for: a tensor by which `record` finds the function again."""
        made = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool, device="meta")
        self.masks.append((made, mask_function))
        return made

    def record(
        self,
        module: nn.Module,
        q_1HTE: torch.Tensor,
        k_1KTE: torch.Tensor,
        v_1KTE: torch.Tensor,
        mask: Mask,
        features: set[ScoreFeature],
        kwargs: Mapping[str, Any],
    ) -> torch.Tensor:
        """Check one call of attention. → an uninitialized output [1, T, H, E]"""
        what = type(module).__name__
        if kwargs.get("is_causal") is False and not mask.both_ways:
            raise Unsupported(f"{what} attends to later tokens")
        for name, value in kwargs.items():
            if name not in _NO_EFFECT and isinstance(value, torch.Tensor):
                raise Unsupported(f"{what} gives its attention {name!r}, which no attention kernel here takes")
        if kwargs.get("softcap") is not None:
            features |= {"soft_cap"}
        if kwargs.get("s_aux") is not None:
            features |= {"sinks"}
        if mask.both_ways and features:
            raise Unsupported(f"{what} attends to later tokens with {' and '.join(sorted(features))}")
        if q_1HTE.dim() != 4 or k_1KTE.dim() != 4:
            raise Unsupported(f"{what} does not attend with queries of [batch, heads, tokens, size]")
        head_dim = q_1HTE.shape[3]
        if k_1KTE.shape[2] != q_1HTE.shape[2]:
            raise Unsupported(f"{what} attends to other tokens than the sequence's own")
        if k_1KTE.shape != v_1KTE.shape or k_1KTE.shape[3] != head_dim:
            raise Unsupported(f"the heads of {what}'s queries, keys and values differ in size")
        layer = KVCacheSpec(num_kv_heads=k_1KTE.shape[1], head_dim=head_dim)
        self.calls.append(AttentionCall(module=module, layer=layer, mask=mask, scores=frozenset(features)))
        return torch.empty_like(q_1HTE.transpose(1, 2))

    def mask_of(self, what: str, attention_mask: torch.Tensor | None, own: Mask | None = None) -> Mask:
        """What the mask given to attention lets a token attend to. own: what the class's own mask does, which is narrower."""
        if own is not None and own.both_ways and not self.pools:
            raise Unsupported(f"{what} attends to later tokens")
        if own is not None and (attention_mask is None or self.mask_of(what, attention_mask) == Mask()):
            return own
        if attention_mask is None:
            if self.pools:
                return Mask(both_ways=True)
            raise Unsupported(f"{what} gives its attention no mask, so that it attends to later tokens")
        for made, function in self.masks:
            whole = getattr(attention_mask, "_base", None) is made and attention_mask.shape == made.shape
            if attention_mask is made or whole:
                return recognize(function, self.no_blocks, pools=self.pools)
        raise Unsupported(f"{what} uses an attention mask that is not one of transformers' own")


def recognize(mask_function: Callable[..., Any], no_blocks: Sequence[torch.Tensor] = (), *, pools: bool = False) -> Mask:
    """What a mask function of transformers lets a token attend to. Raises `Unsupported` for others than those known here.

    no_blocks: tensors that put no token into a block (an image, say) whose tokens attend to each other. pools: tokens may attend to later
    ones.
    """
    if pools and (mask := _both_ways(mask_function)) is not None:
        return mask
    window, chunk, causal = None, None, False
    for part in _parts(mask_function, no_blocks):
        name = part.__qualname__
        if part is causal_mask_function:
            causal = True
        elif name == _WINDOW:
            window = int(inspect.getclosurevars(part).nonlocals["sliding_window"])
        elif name == _CHUNKS:
            chunk = int(inspect.getclosurevars(part).nonlocals["chunk_size"])
        elif name != _SEQUENCES:
            raise Unsupported(f"its attention mask is {name.split('.')[0]!r}, not causal, a sliding window or chunks")
    if not causal:
        raise Unsupported("it attends to later tokens")
    if window is not None and chunk is not None:
        raise Unsupported("its attention mask is a sliding window and chunks at once")
    return Mask(window=chunk if window is None else window, chunked=chunk is not None)


def _both_ways(mask_function: Callable[..., Any]) -> Mask | None:
    """The mask of a function that lets tokens attend equally far to both sides, found by calling it; None for another one."""
    far, nothing = 1 << 20, torch.tensor(0)
    queries = torch.tensor([[far], [far + 13]])
    distances = torch.arange(-_LONGEST_WINDOW - 1, _LONGEST_WINDOW + 2)
    try:
        allowed = torch.as_tensor(mask_function(nothing, nothing, queries, queries + distances)).expand(2, len(distances))
    except Exception:  # it needs more than numbers
        return None
    if not allowed[0].equal(allowed[1]) or not allowed[0].equal(allowed[0].flip(0)):
        return None
    if allowed.all():
        return Mask(both_ways=True)
    window = int(allowed[0].sum()) // 2
    return Mask(window=window, both_ways=True) if window and allowed[0].equal(distances.abs() <= window) else None


def _parts(mask_function: Callable[..., Any], no_blocks: Sequence[torch.Tensor]) -> list[Callable[..., Any]]:
    """The functions that all have to allow a token."""
    if mask_function.__qualname__ not in (_AND, _OR):
        return [mask_function]
    functions = inspect.getclosurevars(mask_function).nonlocals["mask_functions"]
    if mask_function.__qualname__ == _OR:
        functions = [one for one in functions if not _allows_nothing(one, no_blocks)]
        if len(functions) > 1:
            return [mask_function]
    return [part for one in functions for part in _parts(one, no_blocks)]


def _allows_nothing(mask_function: Callable[..., Any], no_blocks: Sequence[torch.Tensor]) -> bool:
    """Whether this lets tokens of a block attend to each other, and there are no blocks."""
    if mask_function.__qualname__ != _BLOCKS:
        return False
    blocks = inspect.getclosurevars(mask_function).nonlocals["block_sequence_ids"]
    return any(blocks is one for one in no_blocks) and not blocks._version  # nothing was written to it since


class _FindsNoBlocks(TorchFunctionMode):
    """Collects tensors that are filled with -1."""

    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.full and args[1:2] == (-1,):
            self.found.append(out)
        return out


_MIX_TOKENS = (torch.conv1d, torch.nn.functional.conv1d, torch.flip, torch.roll, torch.sort, torch.argsort)


_SUMS = ("sum", "mean", "max", "amax", "prod", "var", "std")


class _NumbersTokens(TorchFunctionMode):
    """Raises when a forward numbers or mixes the step's tokens outside of attention: they belong to several sequences.

    pools: of an encoder, which may also read a token's neighbours or sum over a sequence.
    """

    def __init__(self, *, pools: bool) -> None:
        super().__init__()
        self.pools = pools

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _MIX_TOKENS and DRY_TOKENS in out.shape:
            raise Unsupported(f"{func.__name__} mixes tokens outside of attention")
        if func is torch.arange and out.shape == (DRY_TOKENS,):
            raise Unsupported("it numbers the tokens of a step itself, so that they cannot belong to several sequences")
        if func in (torch.cumsum, torch.Tensor.cumsum) and DRY_TOKENS in out.shape:
            raise Unsupported("it counts along the tokens of a step, which may belong to several sequences")
        if self.pools and isinstance(out, torch.Tensor):
            if DRY_TOKENS - 1 in out.shape:
                raise Unsupported("it reads a token's neighbours outside of attention")
            name = getattr(func, "__name__", "")
            if name in _SUMS and isinstance(args[0], torch.Tensor) and DRY_TOKENS in args[0].shape and DRY_TOKENS not in out.shape:
                raise Unsupported(f"{name} reads all tokens of a step outside of attention")
        return out


def dry_run(
    model: Any, running: RunningForward, forward: Callable[[], Any], *, own_positions: bool, pools: bool = False, again: bool = False
) -> list[AttentionCall]:
    """The calls of attention in `forward()`, which runs the model on the meta device.

    own_positions: the model gets positions in its signature, so that it has no reason to number tokens. pools: tokens may attend to later
    ones. again: it ran before.
    Raises `Unsupported`.
    """
    recorder = DryRun(again=again, pools=pools)
    find_sequences = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _no_sequences  # it reads positions on the host
    AttentionMaskInterface.register(DRY_RUN, recorder.make_mask)
    model.config._attn_implementation = DRY_RUN
    running.dry_run = recorder
    try:
        with torch.no_grad(), _FindsNoBlocks(recorder.no_blocks):
            if own_positions:
                with _NumbersTokens(pools=pools):
                    forward()
            else:
                forward()
    finally:
        running.dry_run = None
        masking_utils.find_packed_sequence_indices = find_sequences
        model.config._attn_implementation = ATTENTION
    return recorder.calls


def _no_sequences(position_ids: torch.Tensor) -> None:
    """Stands for transformers' function that tells packed sequences apart: the step does that."""


def state_groups(calls: list[AttentionCall], running: RunningForward) -> tuple[StateGroup, ...]:
    """One group for each kind of call that reads a cache. Every call gets its group and cache.

    Raises `Unsupported` if only some calls read one.
    """
    if any(call.mask.both_ways for call in calls):
        if not all(call.mask.both_ways for call in calls):
            raise Unsupported("some of its layers attend to later tokens, and others only to earlier ones")
        for call in calls:
            call.module.cas_site = (None, call.mask.window or 0)  # type: ignore[assignment]
        return ()
    by_kind: dict[Any, list[AttentionCall]] = {}
    for call in calls:
        by_kind.setdefault(call.kind, []).append(call)
    groups: list[StateGroup] = []
    names: dict[Any, str] = {}
    for kind, alike in by_kind.items():
        layer, mask, scores = kind
        names[kind] = _group_name(mask, set(names.values()))
        groups.append(StateGroup(name=names[kind], layers=(layer,) * len(alike), kind=mask.kind, scores=scores))
    used = dict.fromkeys(names.values(), 0)
    running.sites = []
    for call in calls:
        group = names[call.kind]
        running.sites.append((group, used[group]))
        used[group] += 1
    modules = [call.module for call in calls]
    if len(set(map(id, modules))) == len(modules):
        for module, site in zip(modules, running.sites, strict=True):
            module.cas_site = site  # type: ignore[assignment]
            module.cas_cache = site[1]  # type: ignore[assignment]  # tells the capture that blocks differ
    else:
        for module in modules:
            module.counts_calls = True  # type: ignore[assignment]  # tells the capture not to reuse a block's trace
    return tuple(groups)


def _group_name(mask: Mask, taken: set[str]) -> str:
    name = KV_CACHES if mask.window is None else "chunk_caches" if mask.chunked else WINDOW_CACHES
    return name if name not in taken else next(f"{name}_{i}" for i in range(2, 1000) if f"{name}_{i}" not in taken)
