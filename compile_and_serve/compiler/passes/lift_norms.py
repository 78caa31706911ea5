"""An RMSNorm that a model computes with simple ops becomes `torch.rms_norm`, which later passes and kernels know.

    h = x.float();  n = h · rsqrt(mean(h²) + eps)
    weight · n.to(x.dtype)  |  (weight · n).to(x.dtype)  |  n  |  n · (1 + weight)   →   rms_norm(x, weight, eps)

`torch.rms_norm` computes in float32 with one rounding, so it is at least as accurate as any of these. 1 + weight becomes a weight in
float32, because bfloat16 would round it; that needs kernels which take it (`FLOAT32_NORM_WEIGHT`). Some dtypes are not supported: a float32
weight, which would make the result float32 or would have to be rounded to the activations' dtype, and a norm that is not computed in
float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import (
    FLOAT32_NORM_WEIGHT,
    BasePass,
    NearMiss,
    PassContext,
    PassResult,
    arguments,
    is_call,
    only_user,
    tensor_of,
    weight_of,
)
from compile_and_serve.custom_ops.weight_functions import weight_function


@weight_function("one_plus")
def _one_plus(weight: torch.Tensor) -> torch.Tensor:
    return 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Norm:
    """x / sqrt(mean(x²) + eps) over the last dimension. out: the last node, with the product with the weight."""

    x: Node
    eps: float
    out: Node
    weight: Node | None = None
    plus_one: bool = False


class _Mismatch(Exception):
    """Why a division by a root mean square is not a norm that can be lifted."""


class LiftNorms(BasePass):
    name = "lift_norms"

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses = 0, []
        for node in list(gm.graph.nodes):
            found = _inverse_root_mean_square(node)
            if found is None:
                continue
            try:
                norm = _match(node, *found, ctx)
            except _Mismatch as reason:
                near_misses.append(NearMiss.at(node, str(reason)))
                continue
            _replace(gm, norm, ctx)
            matched += 1
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses))


def _inverse_root_mean_square(node: Node) -> tuple[Node, float] | None:
    """(h, eps) if the node is 1 / sqrt(mean(h², -1, keepdim=True) + eps), else None."""
    if is_call(node, torch.pow):
        if node.args[1] != -0.5:
            return None
    elif not is_call(node, torch.rsqrt):
        return None
    total = node.args[0]
    if not is_call(total, torch.add):
        return None
    mean, eps = arguments(total)
    if not is_call(mean, torch.mean) or not isinstance(eps, float):
        return None
    dims = mean.args[1] if len(mean.args) > 1 else mean.kwargs.get("dim")
    keepdim = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim")
    square = mean.args[0]
    if dims not in (-1, [-1], (-1,)) or not keepdim or mean.kwargs.get("dtype") is not None:
        return None
    if is_call(square, torch.square) or (is_call(square, torch.pow) and square.args[1] in (2, 2.0)):
        return square.args[0], eps  # type: ignore[return-value]
    if is_call(square, torch.mul) and square.args[0] is square.args[1]:
        return square.args[0], eps  # type: ignore[return-value]
    return None


def _match(inverse: Node, wide: Node, eps: float, ctx: PassContext) -> _Norm:
    """The norm around 1 / sqrt(mean(wide²) + eps)."""
    product = only_user(inverse)
    if product is None or not is_call(product, torch.mul) or set(product.args) != {wide, inverse}:
        raise _Mismatch("the inverse root mean square does more than multiply its own input")
    if tensor_of(wide).dtype != torch.float32:
        raise _Mismatch(f"it is computed in {tensor_of(wide).dtype}, not in float32")
    x = wide.args[0] if is_call(wide, torch.Tensor.to) else wide
    assert isinstance(x, Node)
    dtype = tensor_of(x).dtype
    narrow = product if dtype == torch.float32 else _cast_of(product, dtype)
    if narrow is not None:  # weight · n.to(dtype), or no weight
        scaled, weight = _weighted(narrow)
        if weight is None:
            return _Norm(x=x, eps=eps, out=narrow)
        out = scaled
    else:  # (weight · n).to(dtype)
        scaled, weight = _weighted(product)
        if weight is None:
            raise _Mismatch(f"its result is neither multiplied by a weight nor cast back to {dtype}")
        cast = _cast_of(scaled, dtype)
        if cast is None:
            raise _Mismatch(f"it is {tensor_of(scaled).dtype}, and its input {dtype}")
        out = cast
    plus_one = is_call(weight, torch.add)
    base: Any = next(arg for arg in arguments(weight) if arg != 1.0) if plus_one else weight
    base = base.args[0] if is_call(base, torch.Tensor.to) else base
    if plus_one and dtype != torch.float32 and FLOAT32_NORM_WEIGHT not in ctx.kernels:
        raise _Mismatch(f"1 + weight is computed in float32 and would have to be rounded to {dtype}")
    if tensor_of(base).dtype != dtype:
        raise _Mismatch(f"its weight is {tensor_of(base).dtype}, and its input {dtype}")
    if tensor_of(out).dtype != dtype:
        raise _Mismatch(f"it is {tensor_of(out).dtype}, and its input {dtype}")
    if tensor_of(base).dim() != 1:
        raise _Mismatch(f"its weight has {tensor_of(base).dim()} dimensions")
    return _Norm(x=x, eps=eps, out=out, weight=base, plus_one=plus_one)


def _cast_of(node: Node, dtype: torch.dtype) -> Node | None:
    """The cast of `node` to `dtype` if that is its only reader, else None."""
    user = only_user(node)
    return user if user is not None and is_call(user, torch.Tensor.to) and tensor_of(user).dtype == dtype else None


def _weighted(node: Node) -> tuple[Node, Node | None]:
    """(product, weight) if the only reader of `node` multiplies it by a parameter, else (node, None)."""
    product = only_user(node)
    if product is None or not is_call(product, torch.mul):
        return node, None
    left, right = arguments(product)
    other: Any = right if left is node else left
    if not isinstance(other, Node):
        return node, None
    parameter: Any = other
    if is_call(parameter, torch.add) and 1.0 in parameter.args:
        parameter = next(arg for arg in arguments(parameter) if arg != 1.0)
    if is_call(parameter, torch.Tensor.to):
        parameter = parameter.args[0]
    return (product, other) if weight_of(parameter) is not None else (node, None)


def _replace(gm: GraphModule, norm: _Norm, ctx: PassContext) -> None:
    weight = norm.weight
    if norm.plus_one:
        assert weight is not None
        weight = ctx.derived_weight(gm, f"{weight_of(weight)}+1", "one_plus", weight)
    shape = (tensor_of(norm.x).shape[-1],)
    with gm.graph.inserting_before(norm.out):
        lifted = ctx.call(gm, torch.rms_norm, norm.x, shape, weight, norm.eps, origin=norm.out)
    norm.out.replace_all_uses_with(lifted)
    gm.graph.erase_node(norm.out)
