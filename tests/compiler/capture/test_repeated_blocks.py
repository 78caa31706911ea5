"""Tracing one block for all equal ones gives the same graph as tracing each; different blocks are traced separately."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from compile_and_serve.compiler.capture import capture as capturing
from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.capture.repeated_blocks import MAX_KINDS, block_classes, traced_once
from compile_and_serve.compiler.compat import node_source_line, regions_are_reused
from tests.support.rewriting import compute
from tests.support.tiny_models import capture_decoder, capture_spec, tiny_spec

FEATURES = 8
needs_reuse = pytest.mark.skipif(not regions_are_reused(), reason="this torch traces every call of a region")


class Block(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.proj = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.factor * self.proj(x)


class Stack(nn.Module):
    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(32, FEATURES), requires_grad=False)
        self.blocks = nn.ModuleList(Block(factor) for factor in factors)

    def forward(self, input_ids: Any, positions: Any, kv_caches: Any, logits_indices: torch.Tensor) -> torch.Tensor:
        x = self.table[input_ids]
        for block in self.blocks:
            x = block(x)
        return x[logits_indices]


def captured_stack(factors: list[float]) -> CapturedGraph:
    with torch.device("meta"):
        stack = Stack(factors).requires_grad_(False)
    return capture_decoder(stack, torch.float32)


def of_random_weights(graph: CapturedGraph, factors: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the captured graph and of the module itself."""
    stack = Stack(factors).requires_grad_(False)
    for parameter in stack.parameters():
        nn.init.normal_(parameter)
    inputs = {"input_ids": torch.randint(32, (11,)), "logits_indices": torch.tensor([2, 7, 10])}
    out = compute(graph, graph.weights, dict(stack.named_parameters()), inputs)
    return out, stack(inputs["input_ids"], None, None, inputs["logits_indices"])


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


class Nested(Block):
    """A block that contains a list of blocks."""

    def __init__(self, factor: float) -> None:
        super().__init__(factor)
        self.inner = nn.ModuleList(Inner() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        return x + self.factor * self.proj(x)


def test_blocks_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Block", Nested)
    factors = [0.5] * 4
    graph = captured_stack(factors)
    assert not any(node.op == "get_attr" for node in graph.gm.graph.nodes)
    torch.testing.assert_close(*of_random_weights(graph, factors))


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["Llama"])
@needs_reuse
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_graph_is_the_same_as_when_every_block_is_traced(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def operations() -> tuple[int, list[Any], set[Any]]:
        spec = tiny_spec(architecture, 5)
        graph = capture_spec(spec, torch.float32)
        graph.gm.graph.lint()
        number = {node: i for i, node in enumerate(n for n in graph.gm.graph.nodes if n.op != "placeholder")}

        def spelled(arg: torch.fx.Node) -> Any:
            return number.get(arg, arg.meta.get("weight") or arg.meta.get("input"))

        nodes = [(str(n.target), str(torch.fx.node.map_arg((n.args, n.kwargs), spelled)), node_source_line(n)) for n in number]
        values = [str(getattr(n.meta.get("example_value"), "shape", None)) for n in number]
        weights = {n.meta.get("weight") for n in graph.gm.graph.find_nodes(op="placeholder")}
        return graph.regions, [*zip(nodes, values, strict=True)], weights

    regions, nodes, weights = operations()
    monkeypatch.setattr(capturing, "regions_are_reused", lambda: False)
    no_regions, nodes_of_all, weights_of_all = operations()
    assert (regions, no_regions) == (5, 0)
    assert nodes == nodes_of_all
    assert weights == weights_of_all


@pytest.mark.parametrize("factors", [[0.5] * 6, [0.5, 0.25] * 3, [0.5, 0.5, 0.125, 0.125, 0.5]], ids=str)
def test_blocks_of_few_kinds_compute_their_own_results(factors: list[float]) -> None:
    graph = captured_stack(factors)
    assert graph.regions == (len(factors) if regions_are_reused() else 0)
    torch.testing.assert_close(*of_random_weights(graph, factors))


@needs_reuse
@pytest.mark.parametrize("seen_beforehand", [True, False])
def test_blocks_that_all_differ_are_traced_separately(
    seen_beforehand: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    factors = [0.5 + i for i in range(MAX_KINDS + 2)]
    if not seen_beforehand:
        monkeypatch.setattr(capturing, "block_classes", lambda module: [Block])
    with caplog.at_level(logging.INFO, logger="compile_and_serve.compiler.capture.capture"):
        graph = captured_stack(factors)
    assert graph.regions == 0
    assert ("Every Block is traced by itself" in caplog.text) is not seen_beforehand
    torch.testing.assert_close(*of_random_weights(graph, factors))


@needs_reuse
def test_classes_are_restored() -> None:
    class Inherits(Block):
        pass

    def fail_inside() -> None:
        with traced_once([Block, Inherits]):
            assert Block.forward is not before
            raise ZeroDivisionError

    before = Block.forward
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert Block.forward is before
    assert "forward" not in Inherits.__dict__


def test_only_lists_of_one_class_are_blocks() -> None:
    mixed = nn.ModuleList([Block(1.0), nn.Linear(2, 2), Block(1.0)])
    assert block_classes(nn.Sequential(mixed, nn.ModuleList([Block(1.0)] * 2))) == []
    assert block_classes(Stack([1.0] * 3)) == [Block]
