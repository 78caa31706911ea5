"""Gives each rank its share of parameters: of a linear's rows, and of what elementwise ops and ops of ours read beside a shard."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from compile_and_serve.compiler.compat import node_source_line
from compile_and_serve.compiler.passes.shard_placement import Part, Placement, placement_of
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassError, set_example_value, tensor_of, weight_of
from compile_and_serve.compiler.weights.transforms import depends_on_rank
from compile_and_serve.custom_ops.library import ALONG_DIMENSION, ROWS, SHARE_OF_PARTS

MadePlacements = dict[Node, Placement | tuple[Placement, ...]]  # of the values that differ between ranks


def replace_by_rows(weight: Node, parts: Sequence[Part], ctx: PassContext) -> None:
    if len(parts) == 1:
        ctx.replace_weight(weight, ROWS, parts[0].shares, ctx.mesh.tensor)
    else:
        ctx.replace_weight(weight, SHARE_OF_PARTS, *part_constants(parts, ctx))


def part_constants(parts: Sequence[Part], ctx: PassContext) -> tuple[int, ...]:
    """Of `shard_parts`."""
    return ctx.mesh.tensor, *(number for part in parts for number in part)


def recompute(node: Node, ctx: PassContext) -> None:
    try:
        set_example_value(node, ctx.fake_mode)
    except (RuntimeError, TypeError, ValueError) as error:  # torch's errors for sizes that do not match
        reason = str(error).splitlines()[0]
        raise PassError(f"{node_source_line(node)} does not run on a shard ({reason}): should a constant size be -1?") from error


def shard_parameter(operand: Node, wanted: Placement, placements: MadePlacements, done: set[Node], ctx: PassContext) -> bool:
    """Shard the parameter that `operand` is computed from, or the parameters that it has behind one another, so that it has the placement.
    → whether that was possible
    """
    chain = [operand]
    while weight_of(chain[-1]) is None:
        sources = chain[-1].all_input_nodes
        if len(sources) != 1:
            break
        chain.append(sources[0])
    is_joined = weight_of(chain[-1]) is None
    parameters = list(chain[-1].all_input_nodes) if is_joined else [chain.pop()]
    if any(weight_of(one) is None or depends_on_rank(ctx.weights[one.meta["weight"]].expression) for one in parameters):
        return False
    shares = _shares_of_parameters(parameters, wanted, along_rows=is_joined)
    if shares is None:
        return False
    found: MadePlacements = dict(zip(parameters, shares, strict=True))
    for node in reversed(chain):
        placement = placement_of(node, found)
        if placement is None:
            return False
        found[node] = placement
    if found[operand] != wanted or any(user in done and user not in chain for node in found for user in node.users):
        return False
    for parameter, share in zip(parameters, shares, strict=True):
        if share.dimension:
            ctx.replace_weight(parameter, ALONG_DIMENSION, share.dimension, share.parts[0].shares, ctx.mesh.tensor)
        else:
            replace_by_rows(parameter, share.parts, ctx)
    for node in reversed(chain):
        recompute(node, ctx)
    placements.update(found)
    return True


def _shares_of_parameters(parameters: Sequence[Node], wanted: Placement, *, along_rows: bool) -> list[Placement] | None:
    """The placement of each parameter, which have the wanted parts in turn. along_rows: else of one parameter the first dimension that has
    their length. None: they do not fit.
    """
    if not along_rows:
        shape, length = tensor_of(parameters[0]).shape, sum(part.length for part in wanted.parts)
        dimension = next((place for place, size in enumerate(shape) if size == length), None)
        if dimension is None or (dimension and len(wanted.parts) > 1):
            return None
        return [Placement(dimension, wanted.parts)]
    remaining, found = list(wanted.parts), []
    for parameter in parameters:
        parts: list[Part] = []
        while remaining and sum(part.length for part in parts) < tensor_of(parameter).shape[0]:
            parts.append(remaining.pop(0))
        if sum(part.length for part in parts) != tensor_of(parameter).shape[0]:
            return None
        found.append(Placement(0, tuple(parts)))
    return None if remaining else found
