"""Linears get the contribution of each token's LoRA adapter beside them.

    F.linear(x, W)  →  lora_add(F.linear(x, W), x, A, B, adapter_index)

A and B are weights with a slot for each adapter (`compiler/weights/adapter_slots.py`), so loading an adapter changes no graph. The pass
runs before linears are merged and quantized, while a weight's name still is its module's: later passes rewrite the linear, and `lora_add`
reads the part of the result that is its own. In a sharded model A is sharded where the linear is 'rowwise' (its partial sums are added up
with the linear's) and B where it is 'colwise'.

Linears that do not compute [tokens, features], such as the output head, are not targets, nor are embeddings and experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.lora.lora_add  # noqa: F401 (defines the op)
from compile_and_serve.compiler.model import ModelSource
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    is_call,
    tensor_of,
    weight_of,
)
from compile_and_serve.compiler.weights.adapter_slots import A, B, slot_expressions
from compile_and_serve.custom_ops.step import TOKENS, StateGroup, StepInput
from compile_and_serve.custom_ops.step_data import ADAPTER_SLOT

LORA_ADD = torch.ops.cas.lora_add.default

ADAPTER_INDEX = StepInput(
    name="adapter_index", dtype=torch.int32, dims=(TOKENS,), advance="same",
    fill=lambda batch: batch.data_of_token(ADAPTER_SLOT, 0),
)  # fmt: skip


class ApplyLora(BasePass):
    """num_slots: adapters on the device at once. rank: the largest rank of an adapter."""

    name = "apply_lora"
    required = True  # without it, adapters would silently do nothing

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
            if any(is_call(user, LORA_ADD) and user.args[0] is node for user in node.users):
                continue
            weight = node.args[1]
            name = weight_of(weight)
            if name is None or not isinstance(weight, Node):
                near_misses.append(NearMiss.at(node, "its weight is computed, not a parameter"))
                continue
            x, index = node.args[0], ctx.argument(gm, ADAPTER_INDEX.name)
            if tensor_of(x).dim() != 2 or str(tensor_of(x).shape[0]) != str(tensor_of(index).shape[0]):
                continue
            module = name.rpartition(".")[0]
            if module in seen:
                near_misses.append(NearMiss.at(node, f"{module} is called more than once"))
                continue
            seen.add(module)
            out_features, in_features = tensor_of(weight).shape
            of_a, of_b = slot_expressions(
                (self.num_slots, self.rank, in_features, out_features), ctx.dtype, ctx.weights[name].expression
            )
            a = ctx.defined_weight(gm, module + A, of_a, near=weight)
            b = ctx.defined_weight(gm, module + B, of_b, near=weight)
            users = list(node.users)
            with gm.graph.inserting_after(node):
                changed = ctx.call(gm, LORA_ADD, node, x, a, b, index, origin=node)
            for user in users:
                user.replace_input_with(node, changed)
            matched += 1
        return PassResult(matched=matched, near_misses=tuple(near_misses))
