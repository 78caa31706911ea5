"""Ops that return their input unchanged: a cast to the dtype it has, a view to the shape it has, dropout, identity."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compiler.graph_pass import BasePass, PassContext, PassResult, is_call, tensor_of

SAME_IF_EQUAL = (torch.reshape, torch.Tensor.view, torch.flatten, torch.Tensor.expand, torch.Tensor.to, torch.squeeze)


class EliminateNoops(BasePass):
    name = "eliminate_noops"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        for node in list(gm.graph.nodes):
            if _is_noop(node):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                matched += 1
        return PassResult(matched=matched)


def _is_noop(node: Node) -> bool:
    if is_call(node, F.dropout):
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return training is False
    if is_call(node, torch.Tensor.contiguous) or is_call(node, *SAME_IF_EQUAL):
        before, after = tensor_of(node.args[0]), tensor_of(node)
        same = before.dtype == after.dtype and before.dim() == after.dim()
        return same and _same_sizes(before.shape, after.shape) and _same_sizes(before.stride(), after.stride())
    return False


def _same_sizes(left: Any, right: Any) -> bool:
    return str(tuple(left)) == str(tuple(right))
