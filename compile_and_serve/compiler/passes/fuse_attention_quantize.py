"""Attention's output comes rounded to 8 bits where linears round it: the output projection needs no kernel of its own for that.

    x = rope_attention(…);  quantized_linear(x, …)
        →   x, x_q, scale = rope_attention_quantize(…);  quantized_linear(x, …, x_q, scale)

In a step of decodes the attention kernel rounds what it has in registers, or its last program of a sequence the whole row; in any other
step a kernel of its own does, between the pieces instead of in one. x stays beside it, for the kernel that streams a weight for one token
and rounds by itself. In the last layer rows of x are selected before the linear, and then of all three.

It has never won: on an H200 a step of Llama-3.1-8B's shape in float8 took 2.695 ms with it and 2.691 without at one sequence, 4.007 and
3.974 at 64, 7.511 and 7.266 at 256. So it is off, and `--force-pass fuse_attention_quantize` turns it on.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

import compile_and_serve.custom_ops.attention.rope_attention_quantize  # noqa: F401 (defines the op)
from compile_and_serve.compiler.passes.fuse_rope_attention import ROPE_ATTENTION
from compile_and_serve.compiler.passes.quantize_linears import QUANTIZED_LINEAR
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    SkipReason,
    is_call,
    tensor_of,
)

ROPE_ATTENTION_QUANTIZE = torch.ops.cas.rope_attention_quantize.default


class FuseAttentionQuantize(BasePass):
    name = "fuse_attention_quantize"

    def __init__(self, *, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if not self._is_wanted:
            return SkipReason(
                sentence=f"no step of decodes was faster with it on an H200: --force-pass {self.name} turns it on"
            )
        if "rope_attention_quantize" in ctx.kernels:
            return None
        return SkipReason(
            sentence=f"the attention backend has no kernel that rounds its output for {ctx.dtype} on {ctx.device.type}"
        )

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for attention in gm.graph.find_nodes(op="call_function", target=ROPE_ATTENTION):
            selections = [user for user in attention.users if _selects_rows(user)]
            readers = [reader for x in (attention, *selections) for reader in x.users if reader not in selections]
            if not any(_rounds(reader) for reader in readers):
                continue
            if reason := _why_not(readers):
                near_misses.append(NearMiss.at(attention, reason))
            else:
                _replace(gm, attention, selections, readers, ctx)
                matched += 1
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _selects_rows(node: Node) -> bool:
    """Whether it takes the rows of its input that a list of indices names."""
    return is_call(node, operator.getitem) and isinstance(node.args[1], Node) and tensor_of(node.args[1]).dim() == 1


def _rounds(reader: Node) -> bool:
    return is_call(reader, QUANTIZED_LINEAR) and reader.args[9] != "none"


def _why_not(readers: list[Node]) -> str | None:
    for reader in readers:
        if not _rounds(reader):
            return "attention's output is read by something else than linears that round it, too"
        if reader.args[4] is not None:
            return "a linear rounds a norm of attention's output, not what attention gives"
    if len({_rounding(reader) for reader in readers}) > 1:
        return "linears round attention's output differently"
    return None


def _rounding(linear: Node) -> tuple[str, bool, Node | None]:
    """How a linear rounds its input: dtype, whether a scale is for each 128 features, the static scale. Arguments of the op."""
    _, packed, scale, *_, input_scale = linear.args[:11]
    dtype = str(tensor_of(packed).dtype).removeprefix("torch.")
    return dtype, tensor_of(scale).dim() == 2, input_scale  # type: ignore[return-value]


def _replace(
    gm: GraphModule, attention: Node, selections: list[Node], readers: list[Node], ctx: PassContext
) -> None:  # fmt: skip
    # Of the rows that are selected one may be read though the step has several, or the other way round.
    round_one_token = bool(selections)
    with gm.graph.inserting_before(attention):
        args = (*attention.args, *_rounding(readers[0]), round_one_token)
        all_three = ctx.call(gm, ROPE_ATTENTION_QUANTIZE, *args, origin=attention)
        parts = [ctx.call(gm, operator.getitem, all_three, i, origin=attention) for i in range(3)]
    rounded = {parts[0]: parts[1:]}
    attention.replace_all_uses_with(parts[0])
    gm.graph.erase_node(attention)
    for selection in selections:
        with gm.graph.inserting_before(selection.next):
            rounded[selection] = [
                ctx.call(gm, operator.getitem, part, selection.args[1], origin=selection) for part in parts[1:]
            ]
    for reader in readers:
        x = reader.args[0]
        assert isinstance(x, Node)
        reader.args = (*reader.args, *rounded[x])
