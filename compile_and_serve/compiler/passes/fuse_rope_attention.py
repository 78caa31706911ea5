"""QK-norm (if the model has one) + RoPE + KV write + attention become one op at the split point.

    q, k, v = qkv.split(…); attention(rope(norm(q)), rope(norm(k)), v, cache)  →  rope_attention(qkv, cos, sin, cache, …)

The kernel that computes the rotated keys writes them to the cache, so that they do not pass through memory between two kernels. The piece
before the split ends at its last linear. The pass matches head views and the half-split rotation `x·cos + rotate_half(x)·sin` in any
spelling, on [tokens, heads, E], or on [heads, tokens, E] between two transpositions. Queries, keys and values have to come from one merged
linear. On two CPU cores the pass gains nothing (0.97 to 1.00 times the decode step's speed, `cpu-passes-smollm2-2026-11-20.jsonl`); it runs
there to keep the graph the same as on CUDA.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.attention.attention
import compile_and_serve.custom_ops.attention.rope_attention  # noqa: F401 (defines the ops)
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    arguments,
    is_call,
    norm_weight_fits,
    tensor_of,
    weight_of,
)

ATTENTION = torch.ops.cas.attention.default
ROPE_ATTENTION = torch.ops.cas.rope_attention.default


class _Mismatch(Exception):
    """Why an attention op is not a site of this pass."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """A head view of one part of the merged projection, rotated or not."""

    part: Node
    cos: Node | None = None
    sin: Node | None = None
    norm_weight: Node | None = None
    eps: float | None = None


class FuseRopeAttention(BasePass):
    name = "fuse_rope_attention"

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if "rope_attention" in ctx.kernels:
            return None
        return SkipReason(
            sentence=f"the attention backend has no fused RoPE kernel for {ctx.dtype} on {ctx.device.type}"
        )

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in gm.graph.find_nodes(op="call_function", target=ATTENTION):
            try:
                _fuse(gm, node, ctx)
                matched += 1
            except _Mismatch as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _fuse(gm: GraphModule, node: Node, ctx: PassContext) -> None:
    q_node, k_node, v_node, kv_cache, scale, group, soft_cap, sinks, alibi_slopes = arguments(node)
    if alibi_slopes is not None:
        raise _Mismatch("attention with ALiBi slopes has no rotation")
    q, k, v = _rotated(q_node, ctx), _rotated(k_node, ctx), _Heads(_head_view(v_node))
    if (q.cos, q.sin) != (k.cos, k.sin):
        raise _Mismatch("queries and keys are rotated by different angles")
    if (q.norm_weight is None) != (k.norm_weight is None) or q.eps != k.eps:
        raise _Mismatch("queries and keys are not normalized in the same way")
    qkv = _common_split(q.part, k.part, v.part)
    num_heads, num_kv_heads = tensor_of(q_node).shape[1], tensor_of(k_node).shape[1]
    norms = (q.norm_weight, k.norm_weight, q.eps or 1e-6)
    args = (qkv, q.cos, q.sin, kv_cache, num_heads, num_kv_heads, scale, *norms, group, soft_cap, sinks)
    with gm.graph.inserting_before(node):
        fused = ctx.call(gm, ROPE_ATTENTION, *args, origin=node)
        out = ctx.call(gm, torch.unflatten, fused, -1, (-1, tensor_of(q_node).shape[2]), origin=node)
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)
    for user in list(out.users):
        if is_call(user, torch.flatten, torch.reshape, torch.Tensor.view) and tensor_of(user).dim() == 2:
            user.replace_all_uses_with(fused)
            gm.graph.erase_node(user)


def _rotated(node: object, ctx: PassContext) -> _Heads:
    """Match x·cos + rotate_half(x)·sin, x a head view or its RMSNorm."""
    heads_axis = 1
    if _is_transposition(node):
        node, heads_axis = node.args[0], 0
    if not is_call(node, torch.add):
        raise _Mismatch("an operand is not rotated by x·cos + rotate_half(x)·sin")
    for direct, turned in (arguments(node), arguments(node)[::-1]):
        if not (is_call(direct, torch.mul) and is_call(turned, torch.mul)):
            continue
        x, cos = _operands(direct)
        half, sin = _operands(turned)
        if _is_rotate_half(half, x):
            if heads_axis == 0:  # a norm over E may come before or after the transposition
                x = _transposed(x)
            part, norm_weight, eps = _norm(x, ctx)
            if heads_axis == 0:
                part = _transposed(part)
            return _Heads(_head_view(part), _angles(cos, heads_axis), _angles(sin, heads_axis), norm_weight, eps)
    raise _Mismatch("an operand is not rotated by x·cos + rotate_half(x)·sin")


def _is_transposition(node: object) -> TypeGuard[Node]:
    return is_call(node, torch.transpose) and set(node.args[1:]) == {0, 1}


def _transposed(node: object) -> object:
    """The value before its transposition to [heads, tokens, E], or the value itself."""
    return node.args[0] if _is_transposition(node) else node


def _operands(mul: Node) -> tuple[object, object]:
    """(x, angle factor) of a product. The factor has a head axis of length 1."""
    left, right = arguments(mul)
    return (right, left) if is_call(left, torch.unsqueeze) else (left, right)


def _is_rotate_half(node: object, x: object) -> bool:
    """Match cat((-second half of x, first half of x), -1)."""
    if not is_call(node, torch.cat) or len(arguments(node)[0]) != 2:
        return False
    negated, first = arguments(node)[0]
    return is_call(negated, torch.neg) and _is_half(negated.args[0], x, 1) and _is_half(first, x, 0)


def _is_half(node: object, x: object, index: int) -> bool:
    """Match half `index` of x's last dimension, by chunk or by slice."""
    if not is_call(node, operator.getitem):
        return False
    source, item = arguments(node)
    if is_call(source, torch.chunk):
        return arguments(source)[:2] == (x, 2) and item == index
    middle = tensor_of(x).shape[-1] // 2 if isinstance(x, Node) else None
    wanted = slice(None, middle) if index == 0 else slice(middle, None)
    return source is x and isinstance(item, tuple) and item[-1] == wanted


def _norm(node: object, ctx: PassContext) -> tuple[object, Node | None, float | None]:
    if not is_call(node, torch.rms_norm):
        return node, None, None
    x, _shape, weight, eps = arguments(node)
    if weight_of(weight) is None or not norm_weight_fits(weight, x, ctx):
        raise _Mismatch("the head norm's weight is not a parameter of the activations' dtype")
    return x, weight, eps


def _head_view(node: object) -> Node:
    """The two-dimensional tensor behind a [T, heads, E] view."""
    if is_call(node, torch.Tensor.view, torch.reshape, torch.unflatten):
        viewed = arguments(node)[0]
        if tensor_of(viewed).dim() == 2:
            return viewed
    raise _Mismatch("an operand is not a head view of a projection")


def _angles(node: object, heads_axis: int) -> Node:
    if is_call(node, torch.unsqueeze) and arguments(node)[1] == heads_axis and tensor_of(node).dim() == 3:
        return arguments(node)[0]
    raise _Mismatch("the rotation's cos and sin are not [T, E] with one axis for the heads")


def _common_split(q: Node, k: Node, v: Node) -> Node:
    """The merged projection whose parts 0, 1, 2 are q, k, v."""
    parts = (q, k, v)
    sources = {part.args[0] for part in parts if is_call(part, operator.getitem)}
    if len(sources) != 1 or [part.args[1] for part in parts] != [0, 1, 2]:
        raise _Mismatch("queries, keys and values do not come from one merged projection")
    split = sources.pop()
    if not is_call(split, torch.split):
        raise _Mismatch("queries, keys and values do not come from one merged projection")
    return arguments(split)[0]
