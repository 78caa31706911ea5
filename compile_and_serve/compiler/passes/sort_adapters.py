"""Tokens are sorted by their LoRA adapter once per step, for the ops of all layers.

    lora_add(…, adapter_index, ends)  →  lora_add(…, adapter_index, ends, lora_groups(adapter_index))

This is the last pass, because `select_rows_early` gives the last layer's ops an index of fewer rows. GPU kernels need the order: they
multiply tiles of tokens that have one adapter.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.lora.lora_linear  # noqa: F401 (defines the op)
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult, SkipReason
from compile_and_serve.custom_ops.platform import platform_of

# The op and the number of its arguments without groups.
_OPS = {torch.ops.cas.lora_add.default: 6, torch.ops.cas.lora_linear.default: 13}


class SortAdapters(BasePass):
    name = "sort_adapters"
    for_optional = True

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if platform_of(ctx.device).runs_triton_kernels:
            return None
        return SkipReason(sentence=f"kernels on {ctx.device.type} take tokens in their own order")

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        groups: dict[Node, Node] = {}
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or len(node.args) != _OPS.get(node.target):
                continue
            index = node.args[-2]
            if index not in groups:
                with gm.graph.inserting_before(node):
                    groups[index] = ctx.call(gm, torch.ops.cas.lora_groups.default, index, origin=node)
            node.args = (*node.args, groups[index])
            matched += 1
        return PassResult(matched=matched)
