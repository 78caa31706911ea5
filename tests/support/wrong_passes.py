"""Passes that are wrong on purpose, to be caught by the verifier."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult


class DropsResidual(BasePass):
    """The model's last residual add becomes its branch alone."""

    name = "drops_residual"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        add = [n for n in gm.graph.find_nodes(op="call_function", target=torch.add) if "models/" in str(n.stack_trace)][-1]
        add.replace_all_uses_with(add.args[1])  # type: ignore[arg-type]
        gm.graph.erase_node(add)
        gm.graph.eliminate_dead_code()
        return PassResult(matched=1)
