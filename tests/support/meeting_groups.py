"""A pass that lets the ranks of all data groups meet in a collective before each linear: x → x + 0 · (s = s), where s = Σ over groups of x.

It changes no value, whatever lies in padding. Groups whose steps have other numbers of tokens or rows cannot pass it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult
from compile_and_serve.custom_ops.collectives.collectives import ALL_REDUCE
from compile_and_serve.custom_ops.mesh import DATA


class MeetBeforeLinears(BasePass):
    name = "meet_before_linears"
    after = "eliminate_noops"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        linears = list(gm.graph.find_nodes(op="call_function", target=F.linear))
        for node in linears:
            x = node.args[0]
            with gm.graph.inserting_before(node):
                total = ctx.call(gm, ALL_REDUCE, x, DATA, origin=node)
                nothing = ctx.call(gm, torch.mul, ctx.call(gm, torch.eq, total, total, origin=node), 0.0, origin=node)
                node.args = (ctx.call(gm, torch.add, x, nothing, origin=node), *node.args[1:])
        return PassResult(matched=len(linears))
