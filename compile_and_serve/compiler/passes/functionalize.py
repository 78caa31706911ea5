"""Replaces ops that write to a tensor by ops that return a new one. Later readers of the tensor read the new one.

Examples are `h.add_(x)`, `h += x`, `torch.add(h, x, out=h)`, `F.relu(h, inplace=True)`, `h[:, 0] = 0`, `h.zero_()`. The other passes move,
merge and remove ops, which is correct only if values do not change after their op. A write that is visible elsewhere (in a parameter, in
an argument of the model, or through a view that is read later) is an error with the model's source line.

Whether an op returns a view of its input is found by running it again on its inputs' example values. Its own example value does not show
that, because the copies of a repeated block share theirs.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.compat import OpOverload, declared_writes, is_nested_op, node_source_line, tree_leaves
from compile_and_serve.compiler.passes.canonicalize import SIZE, function_of_method
from compile_and_serve.compiler.rewrite.graph_pass import (
    BasePass,
    PassContext,
    PassError,
    PassResult,
    example_value,
    is_call,
    only_user,
    tensor_of,
)

OPERATORS: dict[str, Callable[..., Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
    "ifloordiv": operator.floordiv,
    "imod": operator.mod,
    "ipow": operator.pow,
    "iand": operator.and_,
    "ior": operator.or_,
    "ixor": operator.xor,
    "ilshift": operator.lshift,
    "irshift": operator.rshift,
}
COPY = torch.ops.aten.copy.default  # (x, y) → y in x's shape and dtype
FILLS: dict[str, Callable[..., Any]] = {"zero_": torch.zeros_like, "fill_": torch.fill, "copy_": COPY}
RESHAPES = ("as_strided_", "detach_", "resize_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
PARTS = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")  # ops whose results do not overlap
BUFFERS = {f"{name}{like}" for name in ("empty", "zeros", "ones", "full") for like in ("", "_like")} | {
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
LENGTHS = ("size", "dim", "numel")
NO_FUNCTION = "and no function returns a new tensor for these arguments: build it with torch.where, torch.cat or torch.stack"


class Functionalize(BasePass):
    name = "functionalize"
    required = True

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        rewriter = _Rewriter(gm, ctx)
        return PassResult(matched=rewriter.run())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Write:
    """What a node writes to, and the function that returns a new tensor for the same arguments (None: there is none).

    by_declaration: the op declares the write, so that fx knows it.
    """

    spelling: str
    written: Any
    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    by_declaration: bool = False


class _Rewriter:
    def __init__(self, gm: GraphModule, ctx: PassContext) -> None:
        self.gm, self.ctx = gm, ctx
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.made: set[Node] = set()  # nodes that replace written tensors, and their inputs
        self.restrided: set[Node] = set()  # nodes whose strides differ from those of the tensors that they replace

    def run(self) -> int:
        matched = 0
        for node in list(self.order):
            write = _write_of(node)
            if write is not None and write.by_declaration:
                self._check_declared(node, write)
            elif write is not None:
                self._replace(node, write)
                matched += 1
        if self.restrided:
            self._update_strides()
        return matched

    def _replace(self, node: Node, write: _Write) -> None:
        written = write.written
        if not isinstance(written, Node) or not isinstance(tensor_of(written), torch.Tensor):
            _refuse(node, write, NO_FUNCTION)
        self._check_unseen(node, write)
        before, after = tensor_of(written), self._result(node, write)
        value = tensor_of(after)
        if str(value.shape) != str(before.shape):
            _refuse(node, write, f"a value of shape {list(value.shape)} to a tensor of shape {list(before.shape)}: make a new tensor")
        if str(value.stride()) != str(before.stride()):
            self.restrided.add(after)
        made = after
        while made not in self.order:  # the node and its new inputs take the write's position in the order
            self.made.add(made)
            self.order[made], made = self.order[node], made.prev
        node.replace_all_uses_with(after)
        for user in list(written.users):
            if self._is_after(user, node):
                user.replace_input_with(written, after)
        self.gm.graph.erase_node(node)

    def _result(self, node: Node, write: _Write) -> Node:
        """The new tensor, in the dtype of the written one."""
        try:
            with self.gm.graph.inserting_before(node):
                if write.spelling == "x[…] = …":
                    return self._put(node, *write.args)
                if write.spelling in RESHAPES:
                    _refuse(node, write, f"the shape of a tensor: write `x = x.{write.spelling.removesuffix('_')}(…)`")
                if write.function is None:
                    _refuse(node, write, NO_FUNCTION)
                made = self.ctx.call(self.gm, write.function, *write.args, origin=node, kwargs=write.kwargs)
                dtype = tensor_of(write.written).dtype
                if tensor_of(made).dtype == dtype:
                    return made
                if "out" in node.kwargs:  # some ops compute in `out`'s dtype, others cast to it
                    _refuse(node, write, f"a result of {tensor_of(made).dtype} to a tensor of {dtype}: cast the result instead")
                return self.ctx.call(self.gm, torch.Tensor.to, made, dtype, origin=node)
        except (RuntimeError, TypeError, IndexError) as error:  # the op does not take these arguments
            _refuse(node, write, f"{NO_FUNCTION} ({str(error).splitlines()[0]})")

    def _put(self, node: Node, x: Node, index: Any, value: Any) -> Node:
        """`x` with `value` at `index`."""
        if _is_mask(index, x) and isinstance(value, int | float):
            return self.ctx.call(self.gm, torch.masked_fill, x, index, value, origin=node)
        items = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in (item for item in items if not isinstance(item, Node)):
            at = next(i for i, item in enumerate(items) if item is Ellipsis)
            items[at : at + 1] = [slice(None)] * (tensor_of(x).dim() - len(items) + 1)
        if not all(_is_position(item) for item in items):
            raise TypeError("indices have to be numbers and slices, or one mask of the tensor's shape with a number as the value")
        return self._put_from(node, x, items, 0, value)

    def _put_from(self, node: Node, x: Node, items: list[Any], dim: int, value: Any) -> Node:
        """items: the index from dimension `dim` on. A number removes its dimension, a slice keeps it."""
        while items and items[0] == slice(None):
            items, dim = items[1:], dim + 1
        if not items:
            put = COPY if isinstance(value, Node) else torch.fill
            return self.ctx.call(self.gm, put, x, value, origin=node)
        item, rest = items[0], items[1:]
        index = (*[slice(None)] * dim, item)
        part = self.ctx.call(self.gm, operator.getitem, x, index, origin=node)
        if isinstance(item, slice):
            new = self._put_from(node, part, rest, dim + 1, value)
            bounds = (item.start, item.stop, 1 if item.step is None else item.step)
            return self.ctx.call(self.gm, torch.slice_scatter, x, new, dim, *bounds, origin=node)
        new = self._put_from(node, part, rest, dim, value)
        return self.ctx.call(self.gm, torch.select_scatter, x, new, dim, item, origin=node)

    def _check_unseen(self, node: Node, write: _Write) -> None:
        """Raise if anything but the written tensor's own readers sees the write."""
        put_back = _put_back(node, write.written)
        for member in self._views(node, write.written):
            if member.op == "placeholder":
                name = member.meta.get("weight") or member.meta.get("input") or member.name
                _refuse(node, write, f"to {name!r}, which is the same in every step: make a new tensor instead")
            if put_back is not None and member is put_back.args[0]:
                continue
            for user in member.users:
                if member is not write.written and self._is_after(user, node) and not _reads_length(user):
                    _refuse(
                        node,
                        write,
                        f"to a tensor that is read through another view at {node_source_line(user)}: copy it first "
                        "(`x = x.clone()`), or read only the written tensor",
                    )

    def _check_declared(self, node: Node, write: _Write) -> None:
        """Raise if a custom op writes to a computed tensor. It may write to arguments of the model and to new buffers."""
        for written in (leaf for leaf in tree_leaves(write.written) if isinstance(leaf, Node)):
            views = self._views(node, written)
            if not any(one.op == "placeholder" or _name_of(one) in BUFFERS for one in views):
                _refuse(node, write, "to a computed tensor: let it return a new tensor, or pass it a torch.empty to write to")

    def _views(self, node: Node, written: Node) -> set[Node]:
        """The nodes that share memory with `written` when `node` writes to it, `written` included."""
        found, todo = {written}, [(written, written)]
        while todo:
            one, reached_from = todo.pop()
            bases = [source for source in one.all_input_nodes if self._is_view(one, source)]
            users = [user for user in one.users if self._is_after(node, user) and not _is_other_part(user, one, reached_from)]
            views = [user for user in users if self._is_view(user, one)]
            new = [other for other in (*bases, *views) if other not in found]
            found.update(new)
            todo += [(other, one) for other in new]
        return found

    def _is_view(self, node: Node, source: Node) -> bool:
        if node in self.made or node.op == "output" or is_nested_op(node.target):
            return False
        write = _write_of(node)
        if write is not None:
            return write.written is source
        return bool(_storages(tensor_of(source)) & _storages(example_value(node, self.ctx.fake_mode)))

    def _is_after(self, node: Node, other: Node) -> bool:
        return self.order.get(node, -1) > self.order[other]

    def _update_strides(self) -> None:
        """Recompute the example values of nodes that read tensors whose strides have changed."""
        for node in self.gm.graph.nodes:
            if node.op.startswith("call_") and not self.restrided.isdisjoint(node.all_input_nodes):
                before = node.meta["example_value"]
                node.meta["example_value"] = after = example_value(node, self.ctx.fake_mode)
                if _strides(before) != _strides(after):
                    self.restrided.add(node)


def _write_of(node: Node) -> _Write | None:
    """The write of `node`, or None."""
    name = _name_of(node)
    if name == "triton_kernel_wrapper_mutation":
        raise PassError(
            f"The Triton kernel at {node_source_line(node)} does not declare what it writes: call it in a `torch.library.triton_op`."
        )
    if (declared := declared_writes(node)) is not None:
        return _Write(spelling=name, written=declared, by_declaration=True) if declared else None
    if node.kwargs.get("out") is not None:
        kwargs = {key: value for key, value in node.kwargs.items() if key != "out"}
        function = None if isinstance(node.target, str | OpOverload) else node.target
        return _Write(spelling=f"{name}(out=…)", written=node.kwargs["out"], function=function, args=node.args, kwargs=kwargs)
    if isinstance(node.target, FunctionType) and "inplace" in node.target.__code__.co_varnames:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
        if not bound.arguments.pop("inplace", False):
            return None
        return _Write(spelling=f"{name}(inplace=True)", written=bound.args[0], function=node.target, args=bound.args, kwargs=bound.kwargs)
    if is_call(node, operator.setitem) or name == "__setitem__":
        return _Write(spelling="x[…] = …", written=node.args[0], args=node.args)
    if name.strip("_") in OPERATORS:
        if not isinstance(tensor_of(node), torch.Tensor):
            return None
        return _Write(spelling=name, written=node.args[0], function=OPERATORS[name.strip("_")], args=node.args)
    if name.endswith("_") and not name.endswith("__") and getattr(node.target, "__module__", None) != "_operator":
        written = node.args[0] if node.args else None
        return _Write(spelling=name, written=written, function=_function_for(name), args=node.args, kwargs=node.kwargs)
    return None


def _function_for(name: str) -> Callable[..., Any] | None:
    """`add_` → torch.add."""
    if name in FILLS:
        return FILLS[name]
    base = name.removesuffix("_")
    if not hasattr(torch.Tensor, name):
        return getattr(F, base, None)  # elu_ and similar ones exist only as functions
    return function_of_method(base) if callable(getattr(torch.Tensor, base, None)) else None


def _name_of(node: Node) -> str:
    """`add_` for x.add_(…), torch.add_ and aten.add_.Tensor."""
    if not node.op.startswith("call_"):
        return ""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]


def _put_back(node: Node, written: Node) -> Node | None:
    """For `x[i] += y`, which is `part = x[i]; part += y; x[i] = part`: the last of these nodes, if it comes next."""
    put = only_user(node)
    if is_call(written, operator.getitem) and only_user(written) is node and is_call(put, operator.setitem):
        return put if put is node.next and put.args == (*written.args, node) else None
    return None


def _is_mask(index: Any, x: Node) -> bool:
    """Whether the index is a boolean mask of x's shape."""
    mask = tensor_of(index) if isinstance(index, Node) else None
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() == tensor_of(x).dim()


def _is_position(item: Any) -> bool:
    return isinstance(item, slice) or (isinstance(item, int) and not isinstance(item, bool))


def _is_other_part(user: Node, parts: Node, reached_from: Node) -> bool:
    """Whether `parts` has several results, was reached from one, and `user` is another that does not overlap it."""
    both = all(is_call(part, operator.getitem) and part.args[0] is parts for part in (user, reached_from))
    if not both or user.args[1] == reached_from.args[1]:
        return False
    if _name_of(parts) in PARTS:
        return True
    is_tuple = isinstance(parts.meta["example_value"], tuple)  # as of `topk`
    return is_tuple and not _storages(tensor_of(user)) & _storages(tensor_of(reached_from))


def _reads_length(node: Node) -> bool:
    return is_call(node, SIZE) or _name_of(node) in LENGTHS


def _storages(value: Any) -> set[torch.UntypedStorage]:
    return {leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}


def _strides(value: Any) -> list[str]:
    return [str((leaf.shape, leaf.stride())) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _refuse(node: Node, write: _Write, why: str) -> NoReturn:
    raise PassError(f"{write.spelling} at {node_source_line(node)} writes in place {why}.")
