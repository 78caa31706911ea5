"""The `torch.library` namespace of this project (`cas`), and what the compiler needs to know about each op.

Ops are defined with `Library.define` and `impl`, which have less call overhead than `torch.library.custom_op`. The Library object has to
live as long as the ops are used, so it is a module attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from compile_and_serve.custom_ops.compat import OpOverload

NAMESPACE = "cas"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


class OpKind(Enum):
    """How the splitter treats an op."""

    CAPTURABLE = "capturable"  # may be part of a compiled piece and of a CUDA graph
    SPLIT_POINT = "split point"  # runs between pieces, never inside one


@dataclass(frozen=True, kw_only=True, slots=True)
class OpInfo:
    """What the compiler knows about an op.

    version: part of every artifact key; raise it when the op's numerics, layout or signature change.
    python: the function that a split point runs on every device, if it is one Python function. Calling it avoids the dispatcher.
    """

    kind: OpKind
    version: int
    python: Callable | None = None


OPS: dict[str, OpInfo] = {}


def define(schema: str, *, kind: OpKind, version: int, fake: Callable, **impls: Callable) -> OpOverload:
    """Define `cas::<schema>`, its fake and its kernels. → the overload

    schema: of `Library.define`, for example `"silu_mul(Tensor x) -> Tensor"`; every mutated argument is declared.
    fake: the shape function. impls: dispatch key → kernel, for example `CPU=...`, `CUDA=...`, `CompositeExplicitAutograd=...`.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, fn in impls.items():
        LIBRARY.impl(name, fn, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    one_function = kind is OpKind.SPLIT_POINT and impls.keys() == {"CompositeExplicitAutograd"}
    python = impls["CompositeExplicitAutograd"] if one_function else None
    OPS[f"{NAMESPACE}::{name}"] = OpInfo(kind=kind, version=version, python=python)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
