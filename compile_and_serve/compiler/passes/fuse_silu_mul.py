"""SiLU-mul as one op, where it is not fused into a linear.

    gate, up = x.split(…);  silu(gate) · up   →   silu_mul(x)

`fuse_linears` fuses it into the linear before it. The remaining ones (after linears without a kernel of ours) are fused here, if the op is
measured to be faster than Inductor's fusion (`compiler/artifacts/autotune.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.passes.measured_fusion import MeasuredFusion, Site
from compile_and_serve.compiler.rewrite.graph_pass import NearMiss, PassContext, arguments, is_call, only_user, tensor_of
from compile_and_serve.custom_ops.linear.elementwise import SILU_MUL


def _ours(x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (SILU_MUL(x_TI),)


def _plain(x_TI: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = x_TI.split(x_TI.shape[1] // 2, dim=-1)
    return (F.silu(gate) * up,)


class FuseSiluMul(MeasuredFusion):
    name = "fuse_silu_mul"
    kernel = "silu_mul"
    operation = "SiLU-mul"
    ours = staticmethod(_ours)
    plain = staticmethod(_plain)

    def sites(self, gm: GraphModule, ctx: PassContext) -> Iterator[Site | NearMiss]:
        for silu in gm.graph.find_nodes(op="call_function", target=F.silu):
            product = only_user(silu)
            if product is None or not is_call(product, torch.mul):
                continue
            x = _whole(silu, product)
            if x is None:
                yield NearMiss.at(product, "gate and up are not the two halves of one [tokens, features] tensor")
            else:
                yield Site(inputs=(x,), out=product)

    def replace(self, gm: GraphModule, site: Site, ctx: PassContext) -> None:
        with gm.graph.inserting_before(site.out):
            fused = ctx.call(gm, SILU_MUL, *site.inputs, origin=site.out)
        site.out.replace_all_uses_with(fused)
        gm.graph.erase_node(site.out)


def _whole(silu: Node, product: Node) -> Node | None:
    """x if the product is silu(first half of x) · second half and nothing else reads the halves, else None."""
    gate = silu.args[0]
    up = next((arg for arg in arguments(product) if arg is not silu), None)
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem)):
        return None
    split = gate.args[0]
    if split is not up.args[0] or not is_call(split, torch.split, torch.chunk) or (gate.args[1], up.args[1]) != (0, 1):
        return None
    if len(tensor_of(split)) != 2 or only_user(gate) is not silu or only_user(up) is not product:
        return None
    halves = [tensor_of(part).shape[-1] for part in (gate, up)]
    x = split.args[0]
    assert isinstance(x, Node)
    whole = tensor_of(x)
    return x if whole.dim() == 2 and halves[0] == halves[1] and 2 * halves[0] == whole.shape[1] else None
