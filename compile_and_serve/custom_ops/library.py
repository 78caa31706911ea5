"""The `torch.library` namespace of this project (`cas`), and all that the compiler knows about each op: an op is one file.

Ops are defined with `Library.define` and `impl`, which have less call overhead than `torch.library.custom_op`. The Library object has to
live as long as the ops are used, so it is a module attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from compile_and_serve.custom_ops.compat import OpOverload, OpOverloadPacket, argument_defaults

NAMESPACE = "cas"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
# The weight functions of compiler/passes/tensor_parallel.py, for `Sharding.weights`.
ROWS, COLUMNS, ON_FIRST_RANK = "shard_rows", "shard_columns", "on_first_rank"
SHARE_OF_PARTS = "shard_parts"
EXPERT_ROWS, EXPERT_COLUMNS = "shard_expert_rows", "shard_expert_columns"
EXPERT_SLOTS, EXPERT_PLACEMENT = "take_experts", "expert_placement"  # of moe/placement.py
UNGATED_EXPERT_ROWS, ALONG_DIMENSION = "shard_ungated_expert_rows", "shard_along_dimension"


class OpKind(Enum):
    """How the splitter treats an op."""

    CAPTURABLE = "capturable"  # may be part of a compiled piece and of a CUDA graph
    SPLIT_POINT = "split point"  # runs between pieces, never inside one


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How an op runs on tensor-parallel ranks, each of which has a share of some arguments. Arguments are named as in the schema.

    inputs: the arguments that ranks have shares of, with the sharded dimension (negative: from the end): all of them, or the op runs whole
        on every rank.
    output: the dimension along which the result is sharded; None: the result is the sum over the ranks' results.
        The result's dimension has the parts of the first of them.
    weights: parameters that are sharded with the inputs, each with a weight function that selects a rank's share. With SHARE_OF_PARTS
        its rows are sharded like the first input, and it may be computed from a parameter element by element, or be several parameters
        behind one another.
    weights_of: of the op's arguments, where the functions of `weights` depend on them.
    state: tensors of the step's state with the dimension that has an entry for each, or for every few, of the sharded dimension of an
        input: `{"cache": (2, "k")}`.
    shared_inputs: inputs whose units (heads) several ranks may share, if there are fewer units than ranks.
    must_shard: whole inputs are an error, because a rank's state has only its own heads.
    style, units: of an op without `inputs`. The op is sharded if the model's tp_plan has this style for the module of its first weight,
        which ranks share in units of its dimension units[0]. units[1] is their name in errors.
    """

    inputs: Mapping[str, int] = field(default_factory=dict)
    output: int | None
    weights: Mapping[str, str] = field(default_factory=dict)
    weights_of: Callable[[Mapping[str, Any]], Mapping[str, str]] | None = None
    state: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    shared_inputs: tuple[str, ...] = ()
    must_shard: bool = False
    style: str | None = None
    units: tuple[int, str] = (0, "rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpInfo:
    """All that the compiler knows about an op.

    name: with the namespace, "cas::silu_mul". module: that defines it, for programs that have to import it.
    arguments: names in the schema's order, with their defaults (None if there is none).
    python: the function that a split point runs on every device, if it is one Python function. Calling it avoids the dispatcher.
    The other fields are arguments of `define`.
    """

    name: str
    module: str
    kind: OpKind
    version: int
    arguments: Mapping[str, Any]
    python: Callable[..., Any] | None
    reference: Callable[..., Any] | None
    exact: Callable[..., Any] | None
    across_ranks: Callable[..., Any] | None
    sharding: Sharding | None
    row_wise: bool
    flops: Callable[..., int] | None
    read_shares: Callable[..., Mapping[str, float]] | None


OPS: dict[str, OpInfo] = {}


def define(
    schema: str,
    *,
    version: int,
    fake: Callable[..., Any],
    kind: OpKind = OpKind.CAPTURABLE,
    reference: Callable[..., Any] | None = None,
    exact: Callable[..., Any] | None = None,
    across_ranks: Callable[..., Any] | None = None,
    sharding: Sharding | None = None,
    row_wise: bool = False,
    flops: Callable[..., int] | None = None,
    read_shares: Callable[..., Mapping[str, float]] | None = None,
    **kernels: Callable[..., Any],
) -> OpOverload:
    """Define `cas::<schema>`: its fake, its kernels, and what the compiler knows of it. → the overload

    schema: of `Library.define`, for example `"silu_mul(Tensor x) -> Tensor"`; every mutated argument is declared.
    version: part of every artifact key; raise it when the op's numerics, layout, signature or sharding change.
    fake: the shape function. kernels: by dispatch key, for example `CPU=...`, `CUDA=...`, `CompositeExplicitAutograd=...`.
    reference: the op in plain torch, for every device and dtype. It runs where there is no kernel, and is the op `<name>_reference`, which
        C++ kernels call for what they do not take.
    exact: what the verifier runs in float64 in the op's place: the op without what it rounds by design. None: the reference, or the op.
    across_ranks: of a collective, whose argument `group` names an axis: the result on the ranks of a group, from the list of their first
        arguments and the other arguments.
    sharding: how tensor-parallel ranks run the op; None: only whole.
    row_wise: row i of each result depends only on row i of the first argument, and of others with as many rows.
    flops: of a matrix product, from the arguments (on the meta device); None: one for each element of the result.
    read_shares: the expected share that a call reads of arguments of which it does not read all, from the arguments (on the meta device).
    All functions take the op's arguments by position.
    """
    name = schema.split("(", 1)[0]
    if reference is not None:
        kernels.setdefault("CompositeExplicitAutograd", reference)
        _register(f"{name}_reference{schema.removeprefix(name)}", fake, {"CompositeExplicitAutograd": reference})
    overload = _register(schema, fake, kernels)
    one_function = kind is OpKind.SPLIT_POINT and kernels.keys() == {"CompositeExplicitAutograd"}
    OPS[overload.name()] = OpInfo(
        name=overload.name(),
        module=sys._getframe(1).f_globals["__name__"],
        kind=kind,
        version=version,
        arguments=argument_defaults(overload),
        python=kernels["CompositeExplicitAutograd"] if one_function else None,
        reference=reference,
        exact=exact or reference,
        across_ranks=across_ranks,
        sharding=sharding,
        row_wise=row_wise,
        flops=flops,
        read_shares=read_shares,
    )
    return overload


def _register(schema: str, fake: Callable[..., Any], kernels: Mapping[str, Callable[..., Any]]) -> OpOverload:
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, kernel in kernels.items():
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def op_info(target: object) -> OpInfo | None:
    """What is known of an op of ours; None for anything else that a graph may call."""
    return OPS.get("::".join(str(target).split(".")[:2])) if isinstance(target, OpOverload | OpOverloadPacket) else None
