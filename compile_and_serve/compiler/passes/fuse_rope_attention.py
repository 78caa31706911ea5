"""QK-norm (if the model has one) + RoPE + KV write + attention become one op at the split point.

    q, k, v = qkv.split(…); attention(rope(norm(q)), rope(norm(k)), v, cache)  →  rope_attention(qkv, cos, sin, cache, …)

The kernel that computes the rotated keys writes them to the cache, so that they do not pass through memory between two kernels. The piece
before the split ends at its last linear. The pass matches head views and the rotation `x·cos + rotate_half(x)·sin` in any spelling, of
halves or of neighbours, of a whole head or of its first dimensions, on [tokens, heads, E], or on [heads, tokens, E] between two
transpositions, in the activations' dtype or in float32. Other rotations than that of a whole head's halves are brought to it by
`rewrite/rope_layout.py`, and so is a linear whose outputs are each head's query, key and value (GPT-NeoX). Queries, keys and values that
do not come from one linear (OLMo 2 normalizes them before) are concatenated.

On two CPU cores the pass gains nothing (0.97 to 1.00 times the decode step's speed, `cpu-passes-smollm2-2026-11-20.jsonl`). It runs there
to keep the graph the same as on CUDA.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

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
from compile_and_serve.compiler.rewrite.rope_layout import Angles, Rotation, heads_by_part, order_of_dimensions, permuted, whole_head
from compile_and_serve.compiler.weights.adapter_slots import ROPE_ROWS
from compile_and_serve.custom_ops.attention.attention import ATTENTION
from compile_and_serve.custom_ops.attention.rope_attention import ROPE_ATTENTION
from compile_and_serve.custom_ops.lora.lora_add import LORA_ADD
from compile_and_serve.custom_ops.step import StepInput

SIZE = torch.ops.aten.sym_size.int


class _Mismatch(Exception):
    """Why an attention op is not a site of this pass."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """A head view of one part of the merged projection, rotated or not."""

    part: Node
    cos: Angles | None = None
    sin: Angles | None = None
    rotation: Rotation | None = None
    norm_weight: Node | None = None
    eps: float | None = None


class FuseRopeAttention(BasePass):
    name = "fuse_rope_attention"

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if "rope_attention" in ctx.kernels:
            return None
        return SkipReason(sentence=f"the attention backend has no fused RoPE kernel for {ctx.dtype} on {ctx.device.type}")

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in gm.graph.find_nodes(op="call_function", target=ATTENTION):
            # Without queries of its own, it only writes keys and values (`models/drafters/dflash.py`).
            if arguments(node)[0] is arguments(node)[2]:
                continue
            try:
                _fuse(gm, node, ctx)
                matched += 1
            except _Mismatch as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _fuse(gm: GraphModule, node: Node, ctx: PassContext) -> None:
    if arguments(node)[8] is not None:
        raise _Mismatch("attention with ALiBi slopes has no rotation")
    if arguments(node)[9] is not None:
        raise _Mismatch("tokens that attend to later ones are not fused")
    _separate_parts(gm, node, ctx)
    q_node, k_node, v_node, kv_cache, scale, group, soft_cap, sinks, *_ = arguments(node)
    if _is_transposition(v_node) and _is_transposition(v_node.args[0]):
        v_node = v_node.args[0].args[0]
    q, k, v = _rotated(q_node, ctx), _rotated(k_node, ctx), _Heads(_head_view(v_node))
    if (q.cos, q.sin, q.rotation) != (k.cos, k.sin, k.rotation):
        raise _Mismatch("queries and keys are rotated by different angles")
    if (q.norm_weight is None) != (k.norm_weight is None) or q.eps != k.eps:
        raise _Mismatch("queries and keys are not normalized in the same way")
    assert q.rotation is not None
    assert q.cos is not None
    assert q.sin is not None
    qkv = _common_source(q.part, k.part, v.part)
    num_heads, num_kv_heads, head_dim = (tensor_of(q_node).shape[1], tensor_of(k_node).shape[1], tensor_of(q_node).shape[2])
    cos, sin, norms = q.cos.node, q.sin.node, (q.norm_weight, k.norm_weight)
    if not q.rotation.is_plain(head_dim):
        if qkv is None:
            raise _Mismatch("queries, keys and values do not come from one linear, whose rows could be permuted")
        _permute(gm, ctx, qkv, (num_heads + num_kv_heads) * head_dim, head_dim, q)
        cos = whole_head(gm, ctx, q.cos, q.rotation, head_dim, 1.0)
        sin = whole_head(gm, ctx, q.sin, q.rotation, head_dim, 0.0)
        norms = tuple(None if w is None else permuted(gm, ctx, w, q.rotation, head_dim, head_dim) for w in norms)  # type: ignore[assignment]
    if qkv is None:
        with gm.graph.inserting_before(node):
            qkv = ctx.call(gm, torch.cat, [q.part, k.part, v.part], -1, origin=node)
    args = (qkv, cos, sin, kv_cache, num_heads, num_kv_heads, scale, *norms, q.eps or 1e-6, group, soft_cap, sinks)
    with gm.graph.inserting_before(node):
        fused = ctx.call(gm, ROPE_ATTENTION, *args, origin=node)
        if not q.rotation.is_plain(head_dim):
            fused.meta["key_order"] = order_of_dimensions(head_dim, q.rotation.num_pairs, q.rotation.interleaved)
        out = ctx.call(gm, torch.unflatten, fused, -1, (-1, tensor_of(q_node).shape[2]), origin=node)
    node.replace_all_uses_with(out)
    gm.graph.erase_node(node)
    for user in list(out.users):
        if is_call(user, torch.flatten, torch.reshape, torch.Tensor.view) and tensor_of(user).dim() == 2:
            user.replace_all_uses_with(fused)
            gm.graph.erase_node(user)


def _separate_parts(gm: GraphModule, attention: Node, ctx: PassContext) -> None:
    """Let a linear over [heads, 3, E], of which the values are every third row of E, compute all queries, all keys, then all values."""
    value = _transposed(arguments(attention)[2])
    parts = value.args[0] if is_call(value, operator.getitem) else None
    if not is_call(parts, torch.chunk) or arguments(parts)[1:] != (3, -1):
        return
    heads = _transposed(parts.args[0])
    linear = heads.args[0] if is_call(heads, torch.Tensor.view, torch.reshape) else None
    if not is_call(linear, F.linear) or tensor_of(linear).dim() != 2 or not _has_own_rows(linear, ctx):
        return
    if sum(not is_call(user, SIZE) for user in linear.users) > 1:
        return
    if any(isinstance(one, StepInput) and one.optional for one in ctx.declared.values()):
        return  # adapters: the plan with them would keep keys in another order than the plan without
    head_dim, heads_axis = tensor_of(value).shape[-1], 0 if _is_transposition(parts.args[0]) else 1
    with gm.graph.inserting_before(linear):
        rows = [heads_by_part(gm, ctx, one, 3, head_dim) if isinstance(one, Node) else one for one in arguments(linear)[1:3]]
        made = ctx.call(gm, F.linear, linear.args[0], *rows, origin=linear)
        split = ctx.call(gm, torch.split, made, tensor_of(made).shape[1] // 3, -1, origin=linear)
    for getitem in list(parts.users):
        with gm.graph.inserting_before(getitem):
            part = ctx.call(gm, operator.getitem, split, getitem.args[1], origin=getitem)
            new = ctx.call(gm, torch.unflatten, part, -1, (-1, head_dim), origin=getitem)
            if heads_axis == 0:
                new = ctx.call(gm, torch.transpose, new, 0, 1, origin=getitem)
        getitem.replace_all_uses_with(new)
    for size in [user for user in linear.users if is_call(user, SIZE)]:
        size.replace_input_with(linear, made)
        made.append(size)
    gm.graph.eliminate_dead_code()


def _has_own_rows(linear: Node, ctx: PassContext) -> bool:
    """Whether the rows of the linear's weight and bias may be permuted."""
    weight, bias = (*arguments(linear), None)[1:3]
    nodes = [node for node in (weight, bias) if node is not None]
    if any(weight_of(node) is None for node in nodes):
        return False
    return not {name for node in nodes for name in _parameters(node, ctx)} & ctx.weights.stored.keys()


def _permute(gm: GraphModule, ctx: PassContext, qkv: Node, num_rows: int, head_dim: int, q: _Heads) -> None:
    """Permute the rows of the linear `qkv`, so that whole heads are rotated by halves."""
    assert q.rotation is not None
    slots = None
    if is_call(qkv, LORA_ADD):
        slots, linear = qkv.args[3], qkv.args[0]
        assert isinstance(linear, Node)
        qkv = linear
    weight, bias = (*arguments(qkv), None)[1:3] if is_call(qkv, F.linear) else (None, None)
    if weight_of(weight) is None or (bias is not None and weight_of(bias) is None):
        raise _Mismatch("queries, keys and values do not come from one linear, whose rows could be permuted")
    assert isinstance(weight, Node)
    sources = {name for node in (weight, bias) if isinstance(node, Node) for name in _parameters(node, ctx)}
    if sources & ctx.weights.stored.keys():
        raise _Mismatch("the rows of a quantized weight are not permuted")
    if sum(not is_call(user, SIZE) for user in q.part.users) > 1:
        raise _Mismatch("the projection of the queries is read by something else than attention")
    made = [permuted(gm, ctx, node, q.rotation, head_dim, num_rows) for node in (weight, bias) if isinstance(node, Node)]
    qkv.args = (qkv.args[0], *made)
    qkv.kwargs = {}
    if isinstance(slots, Node):  # an adapter's rows are permuted when it is loaded
        ctx.replace_weight(slots, ROPE_ROWS, head_dim, num_rows, q.rotation.num_pairs, int(q.rotation.interleaved))


def _parameters(weight: Node, ctx: PassContext) -> list[str]:
    return ctx.weights.parameters(ctx.weights[weight.meta["weight"]].expression)


def _rotated(node: Any, ctx: PassContext) -> _Heads:
    """Match x·cos + rotate_half(x)·sin, x a head view or its RMSNorm, or the first dimensions of one; the others follow."""
    heads_axis = 1
    if _is_transposition(node):
        node, heads_axis = node.args[0], 0
    dtype, rest = tensor_of(node).dtype, None
    node = _before_cast(node)
    if is_call(node, torch.cat) and len(arguments(node)[0]) == 2:
        node, rest = arguments(node)[0]
    if not is_call(node, torch.add):
        raise _Mismatch("an operand is not rotated by x·cos + rotate_half(x)·sin")
    for direct, turned in (arguments(node), arguments(node)[::-1]):
        if not (is_call(direct, torch.mul) and is_call(turned, torch.mul)):
            continue
        for x, cos in _operands(direct):
            for half, sin in _operands(turned):
                interleaved = _is_turned(_before_cast(half), x)
                if interleaved is None:
                    interleaved = _is_turned(_before_cast(half), _before_cast(x))
                if interleaved is not None:
                    size = tensor_of(x).shape[-1]
                    rotation = Rotation(size // 2, interleaved)
                    angles = (_angles(cos, heads_axis, interleaved), _angles(sin, heads_axis, interleaved))
                    heads = _heads(_before_cast(_whole(x, rest)), angles, rotation, heads_axis, ctx)
                    if tensor_of(heads.part).dtype != dtype:
                        raise _Mismatch("an operand is rotated in another dtype than the projection's, and not cast back")
                    return heads
    raise _Mismatch("an operand is not rotated by x·cos + rotate_half(x)·sin")


def _before_cast(node: Any) -> Any:
    """The value before a cast from or to float32, in which some classes rotate, as the op does; or the value itself."""
    if is_call(node, torch.Tensor.to):
        source = node.args[0]
        if torch.float32 in (tensor_of(source).dtype, tensor_of(node).dtype):
            return source
    return node


def _heads(x: object, angles: tuple[Angles, Angles], rotation: Rotation, heads_axis: int, ctx: PassContext) -> _Heads:
    if heads_axis == 0:  # a norm over E may come before or after the transposition
        x = _transposed(x)
    part, norm_weight, eps = _norm(x, ctx)
    if heads_axis == 0:
        part = _transposed(part)
    return _Heads(_head_view(part), *angles, rotation, norm_weight, eps)


def _whole(x: object, rest: object) -> object:
    """The heads of which x is the first dimensions and `rest` the others."""
    if rest is None:
        return x
    if is_call(x, operator.getitem) and is_call(rest, operator.getitem) and x.args[0] is rest.args[0]:
        size = tensor_of(x).shape[-1]
        indices = [item[-1] if isinstance(item, tuple) else None for item in (x.args[1], rest.args[1])]
        if indices in ([slice(None, size), slice(size, None)], [slice(0, size), slice(size, None)]):
            return x.args[0]
    raise _Mismatch("the dimensions beside the rotated ones are not the rest of the head")


def _is_transposition(node: object) -> TypeGuard[Node]:
    return is_call(node, torch.transpose) and set(node.args[1:]) == {0, 1}


def _transposed(node: object) -> object:
    """The value before its transposition to [heads, tokens, E], or the value itself."""
    return node.args[0] if _is_transposition(node) else node


def _operands(mul: Node) -> tuple[tuple[object, object], tuple[object, object]]:
    """(x, angle factor) of a product, in both orders."""
    left, right = arguments(mul)
    return (left, right), (right, left)


def _is_turned(node: Any, x: object) -> bool | None:
    """Match cat((-second half of x, first half of x), -1): False; stack((-x[1::2], x[0::2]), -1) flattened: True."""
    interleaved = is_call(node, torch.flatten, torch.reshape, torch.Tensor.view)
    parts = arguments(node)[0] if interleaved else node
    if not is_call(parts, torch.stack if interleaved else torch.cat) or len(arguments(parts)[0]) != 2:
        return None
    negated, first = arguments(parts)[0]
    if not is_call(negated, torch.neg) or not isinstance(x, Node):
        return None
    match = _is_neighbour if interleaved else _is_half
    return interleaved if match(negated.args[0], x, 1) and match(first, x, 0) else None


def _is_neighbour(node: object, x: object, index: int) -> bool:
    """Match x[..., index::2]."""
    if not is_call(node, operator.getitem) or node.args[0] is not x or not isinstance(node.args[1], tuple):
        return False
    starts = (0, None) if index == 0 else (1,)
    return node.args[1][-1] in [slice(start, None, 2) for start in starts]


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


def _angles(node: Any, heads_axis: int, interleaved: bool) -> Angles:
    """cos or sin [T, W], of which `node` is a view with one axis for the heads; in neighbours, the angle of each pair twice."""
    repeated = is_call(node, torch.repeat_interleave)
    if repeated:
        node = arguments(node)[0]
        columns: Any = node.args[1] if is_call(node, operator.getitem) else None
        if columns is not None and columns[-1].start in (None, 0):
            node = node.args[0]  # the columns of the first half are the pairs
    if is_call(node, torch.unsqueeze) and arguments(node)[1] == heads_axis and tensor_of(node).dim() == 3:
        source = scaled = arguments(node)[0]
        while is_call(scaled, torch.mul, torch.Tensor.to, torch.cos, torch.sin):
            scaled = scaled.args[0]
        neighbours = is_call(scaled, torch.repeat_interleave)
        if interleaved == (neighbours or repeated):
            return Angles(source, pairs_are_neighbours=neighbours)
        raise _Mismatch("the rotation's cos and sin do not have the same angle for both dimensions of a pair")
    raise _Mismatch("the rotation's cos and sin are not [T, E] with one axis for the heads")


def _common_source(q: Node, k: Node, v: Node) -> Node | None:
    """The linear whose columns are those of q, then k, then v, and no others (a gate's); None: there is none."""
    parts = (q, k, v)
    if not all(is_call(part, operator.getitem) for part in parts):
        return None
    sources = {part.args[0] for part in parts}
    if len(sources) != 1:
        return None
    source = sources.pop()
    if is_call(source, torch.split):
        whole = [part.args[1] for part in parts] == [0, 1, 2] and len(source.meta["example_value"]) == 3
        return arguments(source)[0] if whole else None
    begin = 0
    for part in parts:
        index = part.args[1]
        if not isinstance(index, tuple) or not isinstance(index[-1], slice) or index[-1].step not in (None, 1):
            return None
        size = tensor_of(part).shape[1]
        if (index[-1].start or 0) != begin:
            return None
        begin += size
    return source if isinstance(source, Node) and tensor_of(source).shape[1] == begin else None
