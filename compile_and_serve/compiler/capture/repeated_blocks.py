"""Traces the repeated blocks of a model only once, so that deep models are captured as fast as shallow ones.

During capture, the blocks of an `nn.ModuleList` are nested regions. Dynamo traces the first block. For a later block that satisfies
the same guards (same code, shapes and plain attributes), it adds a call of the first one's subgraph instead of tracing again.
The calls are then inlined, so that the passes see the same flat graph as if every block had been traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

MAX_KINDS = 4  # kinds of blocks of one class; with more (each block knows its index, say) regions save nothing
_CALL = torch.ops.higher_order.invoke_subgraph


def block_classes(module: nn.Module) -> list[type[nn.Module]]:
    """The classes whose blocks are repeated: an `nn.ModuleList` holds at least three of them, nothing else, and few kinds."""
    classes: dict[type[nn.Module], None] = {}
    for blocks in (list(child) for child in module.modules() if isinstance(child, nn.ModuleList)):
        of_one_class = len({type(block) for block in blocks}) == 1 and not any(_counts_calls(b) for b in blocks)
        if of_one_class and len(blocks) > 2 and len({_plain_attributes(block) for block in blocks}) <= MAX_KINDS:
            classes[type(blocks[0])] = None
    return list(classes)


def _counts_calls(block: nn.Module) -> bool:
    """Whether the block says that its forward counts calls: Dynamo would reuse a trace although the count differs."""
    return any(getattr(module, "counts_calls", False) for module in block.modules())


def _plain_attributes(block: nn.Module) -> tuple[tuple[str, str, Any], ...]:
    """The plain attributes of a block and its submodules, on which its code may depend. Blocks with equal ones are of one kind."""
    return tuple(
        (path, name, value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str)
    )


@contextmanager
def traced_once(classes: list[type[nn.Module]]) -> Iterator[None]:
    """In the block, modules of these classes are nested regions for Dynamo. Outside of a capture they run as usual."""
    own = {cls: cls.__dict__.get("forward") for cls in classes}
    regions = [torch.compiler.nested_compile_region(cls.forward, max_reuse_entries=MAX_KINDS) for cls in classes]
    for cls, region in zip(classes, regions, strict=True):
        cls.forward = region
    try:
        yield
    finally:
        for cls, forward in own.items():
            if forward is None:  # inherited
                del cls.forward
            else:
                cls.forward = forward


def inline_regions(gm: GraphModule) -> int:
    """Replace each call of a region by the region's nodes, also in nested regions. → number of calls in `gm` itself"""
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and node.target is _CALL]
    regions = {call.args[0]: _body(gm, call) for call in calls}
    for body in regions.values():
        inline_regions(body)
        _drop_unread_lengths(body.graph)
    for call in calls:
        region, _, *operands = call.args  # the second argument is the region's name
        outputs = _copy_before(call, regions[region].graph, operands)
        for user in list(call.users):
            assert user.target is operator.getitem, f"a region's call has the user {user.format_node()}"
            user.replace_all_uses_with(outputs[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(call)
    for region in regions:
        gm.graph.erase_node(region)
    gm.delete_all_unused_submodules()
    return len(calls)


def _body(gm: GraphModule, call: Node) -> GraphModule:
    region = call.args[0]
    assert isinstance(region, Node)
    body = getattr(gm, str(region.target))
    assert isinstance(body, GraphModule)
    return body


def _drop_unread_lengths(region: Graph) -> None:
    """Erase sizes that nothing uses. Dynamo erases them in a whole graph, but not in a region."""
    for node in reversed(list(region.nodes)):
        # Ops without a value are kept: they write something.
        is_length = isinstance(node.meta.get("example_value"), int | torch.SymInt | torch.SymBool | torch.Size)
        if node.op.startswith("call_") and is_length and not node.users:
            region.erase_node(node)


def _copy_before(call: Node, region: Graph, operands: list[Any]) -> list[Any]:
    copies: dict[Node, Any] = dict(zip(region.find_nodes(op="placeholder"), operands, strict=True))
    with call.graph.inserting_before(call):
        for node in region.nodes:
            if node.op == "output":
                return [copies[output] for output in node.args[0]]
            if node.op != "placeholder":
                copies[node] = call.graph.node_copy(node, copies.__getitem__)
    raise AssertionError("a region has no output")
