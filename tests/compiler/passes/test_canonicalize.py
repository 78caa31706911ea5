"""Methods of tensors become functions."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from compile_and_serve.compiler.passes.canonicalize import function_of_method


@pytest.mark.parametrize("name", ["__eq__", "__le__", "__and__", "__invert__"])
def test_methods_of_operators_are_operators(name: str) -> None:
    """torch 2.11 captures `x == 0` as a call of the method; a module has a method of this name, too, which is no function of tensors."""
    function, x = function_of_method(name), torch.tensor([0, 1, 2])
    assert function is getattr(operator, name)
    graph = Graph()
    arguments = [graph.placeholder("x"), *([] if name == "__invert__" else [1])]
    graph.output(graph.call_function(function, tuple(arguments)))
    result = GraphModule({}, graph)(x)  # whose code names the function
    assert torch.equal(result, getattr(x, name)(*arguments[1:]))


def test_other_methods_are_functions_of_torch_or_of_its_tensors() -> None:
    assert function_of_method("add") is torch.add
    assert function_of_method("view") is torch.Tensor.view
