"""In which pieces Inductor is told more of what fusing a reduction saves, on devices of Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import rows_at_once, sized_reads
from compile_and_serve.custom_ops.library import op_info

_MIN_NORM_WIDTH = 512  # values of a row: heads have fewer


def has_encoder_norms(gm: GraphModule) -> bool:
    """Whether a piece has LayerNorms, or RMSNorms of several wide rows a token, which no kernel of ours takes: those of encoders.

    What it makes of other pieces was measured without `_norms_at_once`.
    """
    inputs = [node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.rms_norm) if node.args]
    sizes = [x.meta["example_value"].shape for x in inputs if isinstance(x, Node) and "example_value" in x.meta]
    has_rows = any(len(size) > 2 and isinstance(size[-1], int) and size[-1] >= _MIN_NORM_WIDTH for size in sizes)
    return has_rows or bool(gm.graph.find_nodes(op="call_function", target=torch.nn.functional.layer_norm))


def only_scales_vectors(gm: GraphModule) -> bool:
    """Whether a piece has a sum and no products, as of vectors that are divided by their length: with `sized_reads`, that is one kernel."""
    targets = {node.target for node in gm.graph.nodes}
    return torch.sum in targets and torch.nn.functional.linear not in targets and not any(op_info(target) for target in targets)


def writes_out_norms(gm: GraphModule) -> bool:
    """Whether a piece has RMSNorms that no kernel of ours takes, as those whose weight is 1 + a parameter: a mean of squares."""
    inputs = [node.args[0] for node in gm.graph.find_nodes(op="call_function", target=torch.mean) if node.args]
    return any(isinstance(x, Node) and x.target is torch.square for x in inputs)


def fusion_of(gm: GraphModule) -> AbstractContextManager[None]:
    """What Inductor's fusion is told of a piece on a device of Triton kernels."""
    if has_encoder_norms(gm) or writes_out_norms(gm):
        return _norms_at_once()
    return sized_reads() if only_scales_vectors(gm) else nullcontext()


@contextmanager
def _norms_at_once() -> Iterator[None]:
    """In the block, Inductor makes one kernel of a norm and the additions before it, which reads each value once."""
    with sized_reads(), rows_at_once():
        yield
