"""Linears get the contribution of each token's LoRA adapter beside them.

    F.linear(x, W)  →  lora_add(F.linear(x, W), x, A, B, adapter_index, …)

A and B are weights with a slot for each adapter (`compiler/weights/adapter_slots.py`), so loading an adapter changes no graph. The pass
runs after linears are merged, so that QKV and gate/up have one op each. It runs before they are quantized, because their weights are then
still expressions over the checkpoint, which say what was merged. In a sharded model A is sharded where the linear is 'rowwise' (its
partial sums are added up with the linear's) and B where it is 'colwise'.

`fuse_linears` takes `lora_add` into the linear before it. Embeddings and experts are not targets.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.lora.lora_add  # noqa: F401 (defines the op)
from compile_and_serve.compiler.model import ModelSource
from compile_and_serve.compiler.passes.select_rows_early import selects_rows
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    is_call,
    only_user,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.adapter_slots import slot_weights
from compile_and_serve.compiler.weights.quantized_expressions import leaves, parameter_of
from compile_and_serve.compiler.weights.transforms import Expression
from compile_and_serve.custom_ops.lora.limits import MAX_PARTS
from compile_and_serve.custom_ops.step import TOKENS, StateGroup, StepInput
from compile_and_serve.custom_ops.step_data import ADAPTER_SLOT

LORA_ADD = torch.ops.cas.lora_add.default

ADAPTER_INDEX = StepInput(
    name="adapter_index", dtype=torch.int32, dims=(TOKENS,), advance="same", optional=True,
    fill=lambda batch: batch.data_of_token(ADAPTER_SLOT, 0),
)  # fmt: skip


class ApplyLora(BasePass):
    """num_slots: adapters on the device at once. rank: the largest rank of an adapter."""

    name = "apply_lora"
    required = True  # without it, adapters would silently do nothing
    for_optional = True

    def __init__(self, num_slots: int, rank: int) -> None:
        self.num_slots, self.rank = num_slots, rank

    def cache_key(self) -> str:
        return f"{super().cache_key()}({self.num_slots} slots, rank {self.rank})"

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        return (ADAPTER_INDEX,)

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        seen: set[str] = set()
        for node in list(gm.graph.find_nodes(op="call_function", target=F.linear)):
            if any(is_call(user, LORA_ADD) for user in node.users):
                continue
            found = _parts(node, ctx)
            if isinstance(found, str):
                near_misses.append(NearMiss.at(node, found))
                continue
            index = _index(gm, node, ctx)
            if index is None:
                continue
            modules = [module for module, _, _ in found]
            if seen & set(modules):
                near_misses.append(NearMiss.at(node, f"{modules[0]} is called more than once"))
                continue
            seen |= set(modules)
            self._add(gm, node, index, found, ctx)
            matched += len(found)
        return PassResult(matched=matched, near_misses=tuple(near_misses))

    def _add(
        self, gm: GraphModule, linear: Node, index: Node, parts: Sequence[tuple[str, int, Expression]], ctx: PassContext
    ) -> None:
        x, weight = linear.args[:2]
        assert isinstance(weight, Node)
        slots = slot_weights(self.num_slots, self.rank, tensor_of(x).shape[1], parts, ctx.dtype)
        a = ctx.defined_weight(gm, slots.a, slots.of_a, near=weight)
        b = ctx.defined_weight(gm, slots.b, slots.of_b, near=weight)
        ends = list(accumulate(size for _, size, _ in parts))
        users = list(linear.users)
        with gm.graph.inserting_after(linear):
            changed = ctx.call(gm, LORA_ADD, linear, x, a, b, index, ends, origin=linear)
        for user in users:
            user.replace_input_with(linear, changed)


def _parts(node: Node, ctx: PassContext) -> list[tuple[str, int, Expression]] | str:
    """The module, output features and weight expression of each linear that was merged into this one; or why it takes no adapters."""
    name = weight_of(node.args[1])
    if name is None:
        return "its weight is computed, not a parameter"
    expression, out_features = ctx.weights[name].expression, tensor_of(node).shape[-1]
    if not (isinstance(expression, tuple) and expression[0] == "cat"):
        aliases = ctx.weights.aliases.get(name, ())
        return [((aliases[-1] if aliases else name).rpartition(".")[0], out_features, expression)]
    split = only_user(node)
    if not is_call(split, torch.split) or not isinstance(split.args[1], list):
        return "it was merged from several linears, and its outputs are not split"
    merged = expression[1:]
    if len(merged) != len(split.args[1]) or any(len(leaves(one)) != 1 for one in merged):
        return "its outputs are not split as it was merged"
    if len(merged) > MAX_PARTS:
        return f"it was merged of {len(merged)} linears, but adapters take at most {MAX_PARTS}"
    modules = [parameter_of(leaves(one)[0], ctx.quantized_weights).rpartition(".")[0] for one in merged]
    return list(zip(modules, split.args[1], merged, strict=True))


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
