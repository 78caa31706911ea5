"""Removes ops that return their input unchanged: casts to its dtype, views of its shape, dropout, double transpositions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult, is_call, tensor_of

SAME_IF_EQUAL = (torch.reshape, torch.Tensor.view, torch.flatten, torch.Tensor.expand, torch.Tensor.to, torch.squeeze)


class EliminateNoops(BasePass):
    name = "eliminate_noops"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        for node in list(gm.graph.nodes):
            same = node.args[0] if _is_noop(node) else _transposed_twice(node)
            if same is not None:
                node.replace_all_uses_with(same)
                gm.graph.erase_node(node)
                matched += 1
        return PassResult(matched=matched)


def _transposed_twice(node: Node) -> Any:
    """x for a node that transposes x twice, else None."""
    before = node.args[0] if is_call(node, torch.transpose) else None
    return before.args[0] if is_call(before, torch.transpose) and set(before.args[1:]) == set(node.args[1:]) else None


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
