"""Plans cut into stages: where the cuts may lie, and that the stages compute together what the plan computes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import pipeline
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, OpStep, PieceStep, TokenValue
from compile_and_serve.compiler.pieces.stages import StagesError, choose_stages, cost_keys
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from tests.support.all_families import DENSE, MOE, RECURRENT, write_family
from tests.support.staged_engine import plain_piece
from tests.support.tiny_models import fill, tiny_spec, zero_state

KV = StateGroup(name="kv", layers=(KVCacheSpec(num_kv_heads=1, head_dim=4),) * 4)
WINDOW = StateGroup(name="window", layers=(KVCacheSpec(num_kv_heads=1, head_dim=4),) * 2)
HIDDEN = TokenValue(shape=(8,), dtype=torch.float32)


def plan_of(layers: list[str], costs: list[int], **changes: Any) -> ExecutionPlan:
    """A piece and an op for each layer, named by its state; the first piece also makes what all others read. costs: of the pieces."""
    steps: list[Any] = []
    for number, layer in enumerate(layers):
        reads = ("ids",) if number == 0 else (f"o{number - 1}", f"r{number - 1}", "angles")
        makes = (f"q{number}", f"r{number}", *(("angles",) if number == 0 else ()))
        steps += [
            PieceStep(piece="p", inputs=reads, outputs=makes),
            OpStep(op="op", arguments=(f"$q{number}", f"${layer}"), output=f"o{number}"),
        ]
    last = len(layers) - 1
    steps.append(PieceStep(piece="end", inputs=(f"o{last}", f"r{last}", "rows"), outputs=("logits",)))
    values = dict.fromkeys((name for step in steps for name in step.outputs), HIDDEN)
    read = [value for pair in itertools.zip_longest(costs, [], fillvalue=0) for value in pair][: len(steps)]
    given = {"steps": tuple(steps), "results": ("logits",), "outputs": ("logits",), "token_values": values, "bytes_read": tuple(read)}
    return ExecutionPlan(**(given | changes))


def test_cuts_lie_behind_ops_of_state_where_the_parts_cost_about_as_much() -> None:
    layers = ["kv.0", "kv.1", "kv.2", "kv.3"]
    plan = plan_of(layers, [0, 10, 10, 10, 10])
    assert choose_stages(plan, None, [KV], 2).layers == ("kv.2",)  # 20 and 20
    assert choose_stages(plan_of(layers, [30, 10, 10, 10, 10]), None, [KV], 2).layers == ("kv.1",)
    assert choose_stages(plan, None, [KV], 4).layers == ("kv.0", "kv.1", "kv.2")
    assert choose_stages(plan, None, [KV], 3, [1, 1, 2]).layers == ("kv.0", "kv.1")


def test_cuts_follow_measured_time_once_all_steps_have_one() -> None:
    """The last piece, such as an output head, takes as long as two layers; reading weights it is nothing."""
    layers = ["kv.0", "kv.1", "kv.2", "window.0"]
    plan = plan_of(layers, [10, 10, 10, 10, 0])
    by_bytes = choose_stages(plan, None, [KV, WINDOW], 2, seconds={"p": 1e-3})
    assert (by_bytes.layers, by_bytes.by) == (("kv.1",), "bytes of weights")
    keys = cost_keys(plan, [KV, WINDOW])
    assert len(set(keys)) == 4  # both pieces, and attention with each kind of state
    seconds = dict.fromkeys(keys, 0.5e-3) | {"end": 2e-3}
    by_time = choose_stages(plan, None, [KV, WINDOW], 2, seconds=seconds)
    assert (by_time.layers, by_time.by) == (("kv.2",), "measured time")  # 3 and 3
    assert choose_stages(plan, None, [KV, WINDOW], 2, seconds=seconds | {"end": 1e-6}).layers == ("kv.1",)
    by_hand = choose_stages(plan, None, [KV, WINDOW], 2, [1, 3], seconds)
    assert (by_hand.layers, by_hand.by) == (("kv.0",), "hand")


def test_no_cut_lies_where_it_cannot() -> None:
    shared = plan_of(["kv.0", "kv.1", "kv.0", "kv.2"], [0, 1, 1, 1, 1])  # the third layer reads the first one's state
    assert choose_stages(shared, None, [KV], 2).layers == ("kv.0",)
    with pytest.raises(StagesError, match="can be cut in 1 places: set it to 2 or lower"):
        choose_stages(shared, None, [KV], 3)
    plan = plan_of(["kv.0", "kv.1", "kv.2"], [0, 1, 1, 1])
    without = {name: value for name, value in plan.token_values.items() if name != "r1"}  # it has no row for each token
    assert choose_stages(replace(plan, token_values=without), None, [KV], 2).layers == ("kv.0",)
    plain = plan_of(["kv.0", "kv.1", "kv.2"], [0, 1, 1, 1], token_values=without)
    assert choose_stages(plan, plain, [KV], 2).layers == ("kv.0",)  # of both plans


def test_a_stage_hands_on_what_a_later_one_reads() -> None:
    plan = plan_of(["kv.0", "window.0", "kv.1", "window.1"], [0, 1, 1, 1, 1])
    stages = choose_stages(plan, None, [KV, WINDOW], 3, [1, 1, 2])
    first, middle, last = (stages.stage(plan, None, index)[0] for index in range(3))
    assert first.received == ()
    assert first.plan.results == ("o0", "r0", "angles")
    assert first.plan.outputs == tuple(one.name for one in middle.received) == ("received.0", "received.1", "received.2")
    assert middle.plan.results == ("o1", "r1", "received.2")
    assert {one.dims for one in last.received} == {("tokens", 8)}
    assert last.plan.results == last.plan.outputs == ("logits",)
    assert "rows" in last.plan.arguments
    assert "rows" not in (*first.plan.arguments, *middle.plan.arguments)
    held = [stages.held(one.plan) for one in (first, middle, last)]
    assert [[group.held for group in groups] for groups in held] == [[(0,), ()], [(), (0,)], [(1,), (1,)]]


def run(model: CompiledModel, step: Step, received: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return model(replace(step, inputs=step.inputs | received))


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["3"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_compute_together_what_the_model_computes(num_stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "start_piece", plain_piece)
    spec = tiny_spec(layers=3, tie_word_embeddings=True)
    device, dtype = torch.device("cpu"), torch.float32

    def compiled(stage: int | None) -> CompiledModel:
        config = CompileConfig(use_cache=False, pipeline_parallel_size=1 if stage is None else num_stages)
        model = pipeline.compile_model(spec, config, device=device, dtype=dtype, stage=stage)
        assert isinstance(model, CompiledModel)
        fill(model)
        return model

    def step() -> Step:
        state = zero_state(spec.state, 8, {"kv_caches": 16}, dtype)
        return make_step(spec.inputs, spec.state, [(0, 5), (3, 1)], state=state, tokens_per_page={"kv_caches": 16})

    whole, parts = compiled(None), [compiled(index) for index in range(num_stages)]
    expected, given = run(whole, step(), {}), dict[str, torch.Tensor]()
    for part in parts:
        given = run(part, step(), given)
    assert torch.equal(given["logits"], expected["logits"])
    names = [set(part.source_specs) for part in parts]
    assert set.union(*names) == set(whole.source_specs)
    assert set.intersection(*names) == ({"model.embed_tokens.weight"} if num_stages == 2 else set())  # tied
    for part, own in zip(parts, names, strict=True):
        assert part.sources_of_others == set(whole.source_specs) - own
        assert part.is_last_stage == (part is parts[-1])


def logits_of(spec: ModelSpec, models: list[CompiledModel]) -> torch.Tensor:
    """Of the stages one after another, in a step of a prompt and of a part of another one behind cached tokens."""
    given: dict[str, torch.Tensor] = {}
    for model in models:
        sizes = {group.name: 16 for group in model.state}
        state = zero_state(model.state, 16, sizes, torch.float32)
        step = make_step(spec.inputs, model.state, [(0, 21), (0, 5)], state=state, tokens_per_page=sizes)
        with torch.no_grad():
            given = model(replace(step, inputs=step.inputs | given))
    return given["logits"]


# One of each kind of state and of step input. All run with --all-cases.
KINDS = tuple(f"{name}ForCausalLM" for name in "Gemma3 GptOss DeepseekV3 Llama4 Qwen3Next Jamba FalconH1 KimiLinear".split())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "architecture" in metafunc.fixturenames:
        everything = [*DENSE, *MOE, *RECURRENT]
        metafunc.parametrize("architecture", everything if metafunc.config.getoption("--all-cases") else KINDS)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["FalconH1"])
def test_stages_of_every_family(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, three, and the model in one piece have the same logits."""
    monkeypatch.setattr(pipeline, "start_piece", plain_piece)
    config = json.loads((write_family(tmp_path / "model", architecture) / "config.json").read_text())
    spec = build_model(config, dtype=torch.float32)

    def compiled(num_stages: int, stage: int | None) -> CompiledModel:
        options = CompileConfig(use_cache=False, pipeline_parallel_size=num_stages)
        model = pipeline.compile_model(spec, options, device=torch.device("cpu"), dtype=torch.float32, stage=stage)
        assert isinstance(model, CompiledModel)
        fill(model)
        return model

    expected = logits_of(spec, [compiled(1, None)])
    for num_stages in (2, 3):
        assert torch.equal(logits_of(spec, [compiled(num_stages, index) for index in range(num_stages)]), expected)
