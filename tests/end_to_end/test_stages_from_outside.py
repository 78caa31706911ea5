"""A model of two stages, declared and registered from outside: each rank of the pipe axis runs a part, and both together say what the model
in one piece says. The ranks find the model as a plug-in: this module.

Shape legend: T tokens of the step, L rows of logits, D hidden size, H and K query and key/value heads, E head size.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.recurrent import Recurrent
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, INPUT_IDS, LOGITS, POSITIONS, TOKENS, StepInput, StepOutput
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec, PoolingSpec, full_attention
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.runner import loaded_model
from compile_and_serve.runtime.runner.stages import received_inputs, stages_of
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.serve.cli.main import app
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice, FakeGraph
from tests.test_plugins import install

VOCAB, D, H, K, E, LAYERS, CUT, MAX_LEN = 320, 64, 4, 2, 16, 4, 1, 256
REPLAYS_FOLDER = "STAGES_TEST_REPLAYS"  # of the environment: ranks use fake graphs, and leave a file there when they replay one


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v = nn.Linear(D, H * E, bias=False), nn.Linear(D, K * E, bias=False), nn.Linear(D, K * E, bias=False)
        self.o = nn.Linear(H * E, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x_TD: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_TKE, v_TKE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        x_TD = x_TD + self.o(attention(q_THE, k_TKE, v_TKE, kv_cache, E**-0.5).flatten(1))
        return x_TD + self.down(torch.tanh(self.up(x_TD)))


class Part(nn.Module):
    """Some of the layers, under the names that they have in the whole model."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        if first == 0:
            self.tokens, self.places = nn.Embedding(VOCAB, D), nn.Embedding(MAX_LEN, D)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(first, last)})
        if last == LAYERS:
            self.head = nn.Linear(D, VOCAB, bias=False)

    def through(self, x_TD: torch.Tensor, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        for layer, kv_cache in zip(self.layers.values(), kv_caches, strict=True):
            x_TD = layer(x_TD, kv_cache)
        return x_TD


class Whole(Part):
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor], logits_indices: torch.Tensor
    ) -> torch.Tensor:
        return self.head(self.through(self.tokens(input_ids) + self.places(positions), kv_caches)[logits_indices])


class First(Part):
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: list[torch.Tensor]) -> torch.Tensor:
        return self.through(self.tokens(input_ids) + self.places(positions), kv_caches)


class Last(Part):
    def forward(self, hidden: torch.Tensor, kv_caches: list[torch.Tensor], logits_indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.through(hidden, kv_caches)[logits_indices])


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    def spec(part: type[Part], first: int, last: int, inputs: tuple[StepInput, ...], output: StepOutput, **others: Any) -> ModelSpec:
        with torch.device("meta"):
            module = part(first, last).to(dtype).requires_grad_(False).eval()
        return ModelSpec(
            module=module,
            config=config,
            state=(full_attention([KVCacheSpec(num_kv_heads=K, head_dim=E)] * (last - first)),),
            vocab_size=VOCAB,
            max_model_len=MAX_LEN,
            inputs=inputs,
            outputs=(output,),
            tp_plan={"layers.*.[qkv]": "colwise", "layers.*.o": "rowwise", "head": "vocab"},
            **others,
        )

    hidden = StepInput(name="hidden", dtype=dtype, dims=(TOKENS, D), source="device")
    logits = StepOutput(name=LOGITS)
    stages = (
        spec(First, 0, CUT, (INPUT_IDS, POSITIONS), StepOutput(name="hidden", dims=hidden.dims)),
        spec(Last, CUT, LAYERS, (hidden, DECODER_INPUTS[-1]), logits),
    )
    return spec(Whole, 0, LAYERS, DECODER_INPUTS, logits, stages=stages)


register_model("TwoStagesForTests", build)


class NotedGraph(FakeGraph):
    def replay(self) -> None:
        super().replay()
        (Path(os.environ[REPLAYS_FOLDER]) / str(os.getpid())).touch()


class NotingDevice(FakeDevice):
    def capture(self, fn: Any, *, keep_outputs: bool = False) -> Any:
        graph, outputs, seconds = super().capture(fn, keep_outputs=keep_outputs)
        return NotedGraph(graph.fn, outputs), outputs, seconds


def fake_graph_runners(config: Any, spec: ModelSpec, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
    """As `make_graph_runners` on a GPU."""
    samples = spec.outputs[0].name == LOGITS
    options: dict[str, Any] = {"mode": "full", "max_num_seqs": 4, "backends": [], "device": NotingDevice(), "sizes": (1, 2, 4)}
    return GraphRunners([CudaGraphRunner(plans[0], **options, decode_head=begin_step, decode_tail=end_step if samples else None)])


if REPLAYS_FOLDER in os.environ:
    loaded_model.make_graph_runners = fake_graph_runners


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Iterator[Path]:
    """The model's folder, with a tokenizer. Processes find the model, because this module is installed as a plug-in."""
    site, made = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("two-stages")
    install(site, "two-stages", {"compile_and_serve.models": {"two-stages": __name__}})
    config = {"architectures": ["TwoStagesForTests"], "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.3}
    config |= {"num_attention_heads": H, "hidden_size": D}
    (made / "config.json").write_text(json.dumps(config))
    for file in tiny_llama_dir.glob("*token*"):
        (made / file.name).symlink_to(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield made


@pytest.fixture(scope="module")
def cache_dir(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with both stages, compiled ahead of time."""
    made = tmp_path_factory.mktemp("artifacts")
    engine = ["-pp", "2", "--device", "cpu", "--dtype", "float32", "--block-size", "4", "--num-threads", "1"]
    result = CliRunner().invoke(app, ["compile", str(folder), "--output", str(made), *engine])
    assert result.exit_code == 0, result.output
    assert result.output.count("distinct, compiled in") == 2
    return made


@pytest.fixture(scope="module")
def expected(folder: Path, cache_dir: Path) -> dict[str, list[RequestOutput]]:
    """Of the model in one piece, without preemptions."""
    core = EngineCore(tiny_config(folder, max_model_len=120, enforce_eager=False, cache_dir=cache_dir))
    outputs = run_requests(core, mixed_requests())
    assert core.stats().num_preemptions == 0
    core.shutdown()
    return outputs


def keys_of(store: Path) -> list[str]:
    return sorted(entry.key for entry in ArtifactStore(store).entries())


def start(folder: Path, **options: Any) -> EngineCore:
    """On two ranks, with few blocks, so that requests are preempted."""
    return EngineCore(tiny_config(folder, pipeline_parallel_size=2, max_model_len=120, num_kv_blocks=40, **options))


@pytest.fixture(scope="module")
def core(folder: Path, cache_dir: Path) -> Iterator[EngineCore]:
    stored = keys_of(cache_dir)
    core = start(folder, enforce_eager=False, cache_dir=cache_dir, max_num_batched_tokens=64)
    assert core.info.compile_report["artifact"] == "hit"
    assert keys_of(cache_dir) == stored
    yield core
    core.shutdown()


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    entries = [entry for one in outputs for entry in (*(one.new_logprobs or ()), *(one.prompt_logprobs or ())) if entry is not None]
    return [value for entry in entries for value in entry.logprobs]


def check_same(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """Greedy and seeded, with penalties, bad words, allowed tokens and logprobs; preempted, in several chunks."""
    before = core.stats().num_preemptions
    outputs = run_requests(core, mixed_requests())
    assert tokens_of(outputs) == tokens_of(expected)
    for name in ("r6", "r9"):  # of outputs, and of a prompt
        ours, theirs = logprobs_of(outputs[name]), logprobs_of(expected[name])
        assert len(ours) > 16
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
    stats = core.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_total_blocks


def test_both_stages_are_verified() -> None:
    whole = build({}, torch.float32)
    for stage in stages_of(whole, Mesh(pipe=2)):
        config = CompileConfig(use_cache=False, verify_passes=True, pipeline_parallel_size=2)
        model = compile_model(stage, config, device=torch.device("cpu"), dtype=torch.float32)
        assert not [row for row in model.report["passes"] if "failed" in str(row.get("skipped", ""))]
        assert model.source_specs.keys() < dict(whole.module.named_parameters()).keys()


def test_two_stages_say_what_one_piece_says(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    check_same(core, expected)


def test_cached_prefixes_are_taken_up_by_both_stages(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    one = mixed_requests()[4]
    for _ in range(2):
        assert tokens_of(run_requests(core, [one])) == {one.request_id: tokens_of(expected)[one.request_id]}
    assert core.stats().prefix_cache_hits >= 56


def test_both_stages_sleep_and_wake(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    core.sleep(1)
    core.wake_up()
    check_same(core, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"async_scheduling": True, "enforce_eager": False}], ids=["eager", "ahead"])
def test_eager_and_with_a_step_ahead(
    options: dict[str, Any], folder: Path, cache_dir: Path, expected: dict[str, list[RequestOutput]]
) -> None:
    core = start(folder, cache_dir=cache_dir, **options)
    check_same(core, expected)
    core.shutdown()


def test_a_step_ahead_replays_graphs_of_both_stages(
    folder: Path, cache_dir: Path, expected: dict[str, list[RequestOutput]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv(REPLAYS_FOLDER, str(tmp_path))
    core = start(folder, cache_dir=cache_dir, async_scheduling=True, enforce_eager=False, max_num_seqs=4)
    greedy = [one for one in mixed_requests() if one.sampling_params.temperature == 0]
    outputs = tokens_of(run_requests(core, greedy))
    assert outputs == {name: tokens for name, tokens in tokens_of(expected).items() if name in outputs}
    replays = core.stats().graph_replays
    core.shutdown()
    assert len(list(tmp_path.iterdir())) == 2
    assert replays["full"] > 3


def structured(folder: Path) -> tuple[list[EngineRequest], Callable[[dict[str, list[int]]], None]]:
    """Requests for texts of a form, and a function that checks their tokens."""
    tokenizer = load_tokenizer(folder)
    form = StructuredOutputsParams(compiled=to_grammar(StructuredOutputsParams(regex="([0-9a-f]{2} ){6}"), {}))
    ends = {"stop_token_ids": tokenizer.eos_token_ids, "eos_token_ids": tokenizer.eos_token_ids}
    requests = [request(f"s{i}", prompt_of(i, 5 + i), max_tokens=60, structured_outputs=form, **ends) for i in range(3)]

    def check(found: dict[str, list[int]]) -> None:
        for one in found.values():
            assert re.fullmatch("([0-9a-f]{2} ){6}", tokenizer.decode([token for token in one if token not in tokenizer.eos_token_ids]))

    return requests, check


def test_structured_output(core: EngineCore, folder: Path) -> None:
    requests, check = structured(folder)
    check(tokens_of(run_requests(core, requests)))


@pytest.mark.slow
def test_quantized_linears(folder: Path, cache_dir: Path) -> None:
    requests, check = structured(folder)
    found = []
    for size in (1, 2):
        options = {"enforce_eager": False, "cache_dir": cache_dir, "quantization": "int8-weight-only", "pipeline_parallel_size": size}
        core = EngineCore(tiny_config(folder, **options))
        found.append(tokens_of(run_requests(core, requests)))
        core.shutdown()
    assert found[0] == found[1]
    check(found[1])


@pytest.mark.multigpu
@pytest.mark.parametrize("options", [{"cudagraph_mode": "none"}, {}, {"async_scheduling": False}], ids=["no graphs", "graphs", "sync"])
def test_two_gpus(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    given = {"device": "cuda", "block_size": 16, "num_kv_blocks": 256, "attention_backend": "triton", "cache_dir": tmp_path}
    given |= {"enforce_eager": False}
    one = EngineCore(tiny_config(folder, **given))
    expected = tokens_of(run_requests(one, mixed_requests()))
    one.shutdown()
    two = EngineCore(tiny_config(folder, pipeline_parallel_size=2, **given, **options))
    for _ in range(3):
        assert tokens_of(run_requests(two, mixed_requests())) == expected
        while two.idle():
            pass
    two.shutdown()


@pytest.mark.slow
def test_stages_of_two_tensor_parallel_ranks(folder: Path, cache_dir: Path, expected: dict[str, list[RequestOutput]]) -> None:
    core = start(folder, cache_dir=cache_dir, enforce_eager=False, tensor_parallel_size=2)
    assert core.executor.mesh == Mesh(pipe=2, tensor=2)
    check_same(core, expected)
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_lora": True, "enforce_eager": False}, "but enable_lora needs a model in one piece"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "but speculative_config needs a model in one piece"),
        ({"expert_metrics": True}, "but expert_metrics needs a model in one piece"),
        ({"profile_tokens": [1], "enforce_eager": False}, "but profile_tokens needs a model in one piece"),
        ({"dump_dir": "here", "enforce_eager": False}, "but dump_dir needs a model in one piece"),
        ({"distributed_executor_backend": "ray"}, "but distributed_executor_backend 'ray' needs a model in one piece"),
    ],
)
def test_what_stages_cannot_do_is_a_sentence(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        EngineCore(tiny_config(folder, **({"pipeline_parallel_size": 2} | options)))


def test_stages_that_do_not_fit_are_a_sentence() -> None:
    whole = build({}, torch.float32)
    first, last = whole.stages
    with pytest.raises(ValueError, match="does not say how it is cut into stages, but pipeline_parallel_size is 2"):
        stages_of(replace(whole, stages=()), Mesh(pipe=2))
    with pytest.raises(ValueError, match=r"The model has 2 stages, but pipeline_parallel_size is 3: use 2\."):
        stages_of(whole, Mesh(pipe=3))
    optional = StepInput(name="marks", dtype=torch.int64, dims=(TOKENS,), fill=lambda batch: batch.positions, optional=True)
    memories = StateGroup(name="memories", layers=(), kind=Recurrent())
    for change, what in (
        ({"pooling": PoolingSpec(kind="embed", width=D)}, "A pooling model"),
        ({"whole_prompts": True}, "A model that computes whole prompts"),
        ({"stages": (replace(first, inputs=(*first.inputs, optional)), last)}, "A model with optional inputs"),
        ({"stages": (replace(first, state=(*first.state, memories)), last)}, "A model with recurrent state"),
        ({"quantized_weights": {"head.weight": object()}}, "A quantized checkpoint"),
    ):
        with pytest.raises(ValueError, match=f"{what} runs in one piece, but pipeline_parallel_size is 2: set it to 1"):
            stages_of(replace(whole, **change), Mesh(pipe=2))  # type: ignore[arg-type]
    assert received_inputs((first, last), 0) == ()
    assert [one.name for one in received_inputs((first, last), 1)] == ["hidden"]
    with pytest.raises(ValueError, match=r"stages\[1\] of the model reads 'hidden' from the device, but no stage before it gives it"):
        received_inputs((replace(first, outputs=()), last), 1)
    with pytest.raises(ValueError, match=r"is given \('tokens', 3\): both must be the same and begin with 'tokens'"):
        received_inputs((replace(first, outputs=(StepOutput(name="hidden", dims=(TOKENS, 3)),)), last), 1)
    with pytest.raises(ValueError, match=r"stages\[0\] of the model reads 'hidden' from the device"):
        received_inputs((last, first), 0)


def test_a_loader_passes_over_the_other_stages_weights() -> None:
    whole = build({}, torch.float32)
    whole = replace(
        whole, stages=tuple(replace(one, weight_map={"wte": "tokens.weight", "lm_head": "head.weight"}) for one in whole.stages)
    )
    first, last = stages_of(whole, Mesh(pipe=2))
    assert first.weight_map["wte"] == "tokens.weight"
    assert first.weight_map["lm_head"] is first.weight_map["head.weight"] is first.weight_map["layers.3.o.weight"] is None
    assert last.weight_map["wte"] is last.weight_map["layers.0.o.weight"] is None
    assert last.weight_map["lm_head"] == "head.weight"
    assert "layers.3.o.weight" not in last.weight_map
