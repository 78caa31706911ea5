"""Linears, embeddings and experts get the contribution of each token's LoRA adapter.

    F.linear(x, W)       →  lora_add(F.linear(x, W), x, A, B, adapter_index, …)
    F.embedding(ids, W)  →  lora_add(F.embedding(ids, W), rows ids of Aᵀ, identity, B, adapter_index, …)
    experts(x, …)        →  experts(x, …, A and B of gate/up and of down, adapter_index)

A and B are weights with a slot for each adapter (`compiler/weights/adapter_slots.py`), so loading an adapter changes no graph. The pass
runs after linears are merged, so that QKV and gate/up have one op each. It runs before they are quantized, because their weights are then
still expressions over the checkpoint, which say what was merged. In a sharded model A is sharded where the linear is 'rowwise' (its
partial sums are added up with the linear's) and B where it is 'colwise'.

`fuse_linears` takes `lora_add` into the linear before it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.model import ModelSource
from compile_and_serve.compiler.passes.select_rows_early import selects_rows
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    is_call,
    only_user,
    op_arguments,
    set_example_value,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.adapter_slots import is_sharded, slot_weights
from compile_and_serve.compiler.weights.embedding_slots import embedding_slots
from compile_and_serve.compiler.weights.expert_slots import expert_slots
from compile_and_serve.compiler.weights.transforms import expression_spec
from compile_and_serve.custom_ops.library import ROWS, SHARE_OF_PARTS
from compile_and_serve.custom_ops.lora.limits import MAX_PARTS
from compile_and_serve.custom_ops.lora.lora_add import LORA_ADD
from compile_and_serve.custom_ops.moe.experts import EXPERTS
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import TOKENS, StepInput
from compile_and_serve.custom_ops.step_data import ADAPTER_SLOT
from compile_and_serve.custom_ops.weight_functions import Expression

ADAPTER_INDEX = StepInput(
    name="adapter_index",
    dtype=torch.int32,
    dims=(TOKENS,),
    advance="same",
    optional=True,
    fill=lambda batch: batch.data_of_token(ADAPTER_SLOT, 0),
)


class _NoAdapters(Exception):
    """Why a linear, embedding or experts take no adapters."""


class ApplyLora(BasePass):
    """num_slots: adapters on the device at once. rank: the largest rank of an adapter. has_experts: experts take adapters, too."""

    name = "apply_lora"
    version = 4
    required = True  # without it, adapters would silently do nothing
    for_optional = True

    def __init__(self, num_slots: int, rank: int, has_experts: bool = False) -> None:
        self.num_slots, self.rank, self.has_experts = num_slots, rank, has_experts

    def cache_key(self) -> str:
        experts = ", experts" if self.has_experts else ""
        return f"{super().cache_key()}({self.num_slots} slots, rank {self.rank}{experts})"

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        return (ADAPTER_INDEX,)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        seen: set[str] = set()
        for node in list(gm.graph.nodes):
            try:
                if is_call(node, F.linear):
                    matched += self._adapt_linear(gm, node, seen, ctx)
                elif is_call(node, F.embedding):
                    matched += self._adapt_embedding(gm, node, seen, ctx)
                elif is_call(node, EXPERTS) and self.has_experts:
                    matched += self._adapt_experts(gm, node, ctx)
            except _NoAdapters as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
        return PassResult(matched=matched, near_misses=tuple(near_misses))

    def _adapt_linear(self, gm: GraphModule, linear: Node, seen: set[str], ctx: PassContext) -> int:
        """Returns the number of linears that were merged into this one; 0 if it has its adapters, or no token of its own."""
        if _has_adapters(linear):
            return 0
        parts = _parts(linear, ctx)
        index = _index(gm, linear, ctx)
        if index is None:
            return 0
        _see(seen, *(module for module, *_ in parts))
        x, weight = linear.args[:2]
        assert isinstance(weight, Node)
        slots = slot_weights(self.num_slots, self.rank, tensor_of(x).shape[1], parts, ctx.dtype)
        a = ctx.defined_weight(gm, slots.a, slots.of_a, near=weight)
        b = ctx.defined_weight(gm, slots.b, slots.of_b, near=weight)
        _add(gm, linear, x, a, b, index, list(accumulate(size for _, size, *_ in parts)), ctx)
        return len(parts)

    def _adapt_embedding(self, gm: GraphModule, embedding: Node, seen: set[str], ctx: PassContext) -> int:
        if _has_adapters(embedding):
            return 0
        ids, weight = embedding.args[:2]
        name = weight_of(weight)
        if name is None or not isinstance(weight, Node):
            raise _NoAdapters("its weight is computed, not a parameter")
        index = ctx.argument(gm, ADAPTER_INDEX.name)
        if str(tensor_of(ids).shape) != str(tensor_of(index).shape):
            raise _NoAdapters("it does not look up one row for each token")
        module, expression = name.rpartition(".")[0], ctx.weights[name].expression
        _see(seen, module)
        slots = embedding_slots(
            module, self.num_slots, self.rank, tensor_of(weight).shape, _whole_rows(expression, ctx), expression, ctx.dtype
        )
        rows, b, identities = (ctx.defined_weight(gm, *one, near=weight) for one in (slots.rows, slots.blocks, slots.identities))
        with gm.graph.inserting_after(embedding):
            slot = ctx.call(gm, torch.sub, index, 1, origin=embedding)
        with gm.graph.inserting_after(slot):
            own_slot = ctx.call(gm, torch.clamp, slot, 0, origin=embedding)
        with gm.graph.inserting_after(own_slot):
            x = ctx.call(gm, operator.getitem, rows, (own_slot, ids), origin=embedding)
        _add(gm, embedding, x, identities, b, index, [tensor_of(embedding).shape[1]], ctx, after=x)
        return 1

    def _adapt_experts(self, gm: GraphModule, node: Node, ctx: PassContext) -> int:
        args = op_arguments(node)
        if args["adapter_index"] is not None:
            return 0
        if args["activation"] == "relu2":
            raise _NoAdapters("its experts have no gate: adapters of such experts are not supported")
        if args["activation"] != "silu":
            raise _NoAdapters("the checkpoint's gate and up rows alternate: adapters of such experts are not supported")
        index = _index(gm, node, ctx)
        if index is None:
            return 0
        for linear, parts in (("gate_up", 2), ("down", 1)):
            weight = args[linear]
            name = weight_of(weight)
            if name is None or not isinstance(weight, Node):
                raise _NoAdapters("its weights are computed, not parameters")
            expression, shape = ctx.weights[name].expression, tensor_of(weight).shape
            if any(not ctx.weights.stored[one].is_quantized for one in ctx.weights.parameters(expression) if one in ctx.weights.stored):
                raise _NoAdapters("the checkpoint holds them transposed: adapters of such experts are not supported")
            slots = expert_slots(name, self.num_slots, self.rank, shape, parts, expression, ctx.dtype)
            args[f"{linear}_a"], args[f"{linear}_b"] = (ctx.defined_weight(gm, *one, near=weight) for one in slots)
        node.args = tuple((args | {"adapter_index": index}).values())
        set_example_value(node, ctx.fake_mode)
        return 2


def _has_adapters(node: Node) -> bool:
    return any(is_call(user, LORA_ADD) for user in node.users)


def _see(seen: set[str], *modules: str) -> None:
    if seen & set(modules):
        raise _NoAdapters(f"{modules[0]} is called more than once")
    seen.update(modules)


def _add(
    gm: GraphModule, node: Node, x: object, a: Node, b: Node, index: Node, ends: list[int], ctx: PassContext, after: Node | None = None
) -> None:
    """Replace a linear or embedding by itself with its adapters, which are added after the node `after` (None: after itself)."""
    users = list(node.users)
    with gm.graph.inserting_after(after or node):
        changed = ctx.call(gm, LORA_ADD, node, x, a, b, index, ends, origin=node)
    for user in users:
        user.replace_input_with(node, changed)


def _parts(node: Node, ctx: PassContext) -> list[tuple[str, int, int, Expression]]:
    """Of each linear that was merged into this one: module, output features here and of all ranks together, weight's expression."""
    name = weight_of(node.args[1])
    if name is None:
        raise _NoAdapters("its weight is computed, not a parameter")
    expression, out_features = ctx.weights[name].expression, tensor_of(node).shape[-1]
    if not (isinstance(expression, tuple) and expression[0] == "cat"):
        aliases = ctx.weights.aliases.get(name, ())
        module = (aliases[-1] if aliases else name).rpartition(".")[0]
        return [(module, out_features, _whole_rows(expression, ctx), expression)]
    split = only_user(node)
    if not is_call(split, torch.split) or not isinstance(split.args[1], list):
        raise _NoAdapters("it was merged from several linears, and its outputs are not split")
    merged = expression[1:]
    if len(merged) != len(split.args[1]) or any(len(ctx.weights.parameters(one)) != 1 for one in merged):
        raise _NoAdapters("its outputs are not split as it was merged")
    if len(merged) > MAX_PARTS:
        raise _NoAdapters(f"it was merged of {len(merged)} linears, but adapters take at most {MAX_PARTS}")
    modules = [ctx.weights.parameters(one)[0].rpartition(".")[0] for one in merged]
    rows = [_whole_rows(one, ctx) for one in merged]
    return list(zip(modules, split.args[1], rows, merged, strict=True))


def _whole_rows(expression: Expression, ctx: PassContext) -> int:
    """Rows of a weight before it was sharded: ranks that do not divide a vocabulary pad it."""
    whole = expression[1] if is_sharded(expression, ROWS) or is_sharded(expression, SHARE_OF_PARTS) else expression
    return expression_spec(whole, ctx.weights.sources, ctx.device).shape[0]


def _index(gm: GraphModule, node: Node, ctx: PassContext) -> Node | None:
    """The adapter of each row of a linear's input: of all tokens, or of the rows whose outputs are wanted."""
    x = tensor_of(node.args[0])
    if x.dim() != 2:
        return None
    index = ctx.argument(gm, ADAPTER_INDEX.name)
    if str(x.shape[0]) == str(tensor_of(index).shape[0]):
        return index
    for selection in gm.graph.find_nodes(op="call_function", target=operator.getitem):
        if selects_rows(selection) and str(tensor_of(selection).shape[0]) == str(x.shape[0]):
            with gm.graph.inserting_before(node):
                return ctx.call(gm, operator.getitem, index, selection.args[1], origin=node)
    return None
