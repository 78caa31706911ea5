"""Tokens are sorted by their LoRA adapter once per step, for the ops of all layers.

    lora_add(…, adapter_index, ends)  →  lora_add(…, adapter_index, ends, lora_groups(adapter_index))

This is the last pass, because `select_rows_early` gives the last layer's ops an index of fewer rows. GPU kernels need the order: they
multiply tiles of tokens that have one adapter.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult, SkipReason, op_arguments
from compile_and_serve.custom_ops.lora.lora_add import LORA_GROUPS
from compile_and_serve.custom_ops.platform import platform_of


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
            args = op_arguments(node)
            if args.get("groups", node) is not None:
                continue
            index = args["adapter_index"]
            if index not in groups:
                with gm.graph.inserting_before(node):
                    groups[index] = ctx.call(gm, LORA_GROUPS, index, origin=node)
            node.args = tuple((args | {"groups": groups[index]}).values())
            matched += 1
        return PassResult(matched=matched)
