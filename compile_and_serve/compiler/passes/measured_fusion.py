"""Base of the passes that insert an op of ours where Inductor would fuse, too. Each shape is measured, and the faster one is used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.rewrite.graph_pass import BasePass, NearMiss, PassContext, PassResult, SkipReason, tensor_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """inputs, constants: arguments of the op. out: the node that the report names."""

    inputs: tuple[Node, ...]
    out: Node
    constants: tuple[float, ...] = ()


class MeasuredFusion(BasePass, ABC):
    """kernel: name of the `cas` op. operation: its name for users. ours, plain: functions of (*inputs, *constants) that return tuples
    of tensors.
    """

    kernel: str
    operation: str
    ours: Callable[..., tuple[torch.Tensor, ...]]
    plain: Callable[..., tuple[torch.Tensor, ...]]

    def guard(self, ctx: PassContext) -> SkipReason | None:
        if self.kernel in ctx.kernels:
            return None
        return SkipReason(sentence=f"there is no {self.operation} kernel for {ctx.dtype} on {ctx.device.type}")

    @abstractmethod
    def sites(self, gm: GraphModule, ctx: PassContext) -> Iterator[Site | NearMiss]:
        """Every site of the op, and every near miss."""

    @abstractmethod
    def replace(self, gm: GraphModule, site: Site, ctx: PassContext) -> None:
        """Replace the site by the op."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched, near_misses, left, measured = 0, [], [], set[str]()
        for site in self.sites(gm, ctx):  # lazily: a replaced site may be the input of the next
            if isinstance(site, NearMiss):
                near_misses.append(site)
                continue
            tensors: list[Any] = [tensor_of(node) for node in site.inputs]
            choice = ctx.choose(self.name, self.ours, self.plain, tensors, *site.constants)
            measured.add(choice.sentence())
            if choice.use_ours:
                self.replace(gm, site, ctx)
                matched += 1
            else:
                left.append(NearMiss.at(site.out, choice.sentence()))
        gm.graph.eliminate_dead_code()
        return PassResult(matched=matched, near_misses=tuple(near_misses), left_to_inductor=tuple(left), measured=tuple(sorted(measured)))
