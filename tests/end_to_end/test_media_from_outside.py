"""A model with images, declared and registered from outside: placeholder tokens whose embeddings come from rows that ride with the
request, and positions of three rows. It compiles, is verified and captured, and serves; steps without images run the plain plan.

Shape legend: T tokens of the step, L rows of logits, D hidden size, H heads, E head size, F features of a row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec
from compile_and_serve.custom_ops.step import INPUT_IDS, LOGITS_INDICES, TOKENS, StepInput, TokenBatch, running
from compile_and_serve.custom_ops.step_data import ArrayInfo, MediaItem, StepArray
from compile_and_serve.models.families import register_model
from compile_and_serve.models.layers import apply_rope
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.distributed.rank_messages import RunStep, ToRank
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import AddRequest, EngineRequest, RequestOutput, ToEngine
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import fill, zero_state

VOCAB, D, H, E, F, LAYERS = 320, 32, 2, 16, 6, 2
IMAGE = 7  # the placeholder's token
MAX_LEN = 256
FREQUENCIES = torch.tensor([1.0, 0.3, 0.1, 0.03])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_THE, v_THE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        q_THE, k_THE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_THE, cos_TE, sin_TE)
        return x_TD + self.o(attention(q_THE, k_THE, v_THE, cache, E**-0.5, KV_CACHES).flatten(1))


class Seeing(nn.Module):
    """forward without `has_row` and `rows`: no token is of an image."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.projector = nn.Linear(F, D, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.register_buffer("frequencies", torch.empty(len(FREQUENCIES)), persistent=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        places: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        has_row: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embedding(input_ids)
        if has_row is not None and rows is not None:
            x_TD = torch.where(has_row[:, None] > 0, self.projector(rows.to(x_TD.dtype)), x_TD)
        turns_3TE = places[:, :, None].to(torch.float32) * self.frequencies
        angles_TE = torch.cat((turns_3TE[0], turns_3TE[1] + 1.7 * turns_3TE[2]), dim=-1).repeat(1, 2)
        cos_TE, sin_TE = angles_TE.cos().to(x_TD.dtype), angles_TE.sin().to(x_TD.dtype)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, cache)
        return self.head(x_TD[logits_indices])


def fill_rows(batch: TokenBatch) -> np.ndarray | None:
    pieces = list(batch.rows_of("rows"))
    if not pieces:
        return None
    values = np.zeros((len(batch.token_ids), F), dtype=np.float32)
    for tokens, rows in pieces:
        values[tokens] = rows
    return values


def fill_has_row(batch: TokenBatch) -> np.ndarray | None:
    pieces = list(batch.rows_of("rows"))
    if not pieces:
        return None
    values = np.zeros(len(batch.token_ids), dtype=np.int32)
    for tokens, _ in pieces:
        values[tokens] = 1
    return values


PLACES = StepInput(
    name="places",
    dtype=torch.int64,
    dims=(3, TOKENS),
    fill=lambda batch: batch.with_rows_of("places", np.tile(batch.positions, (3, 1)), axis=1, goes_on=True),
    advance="next",
    arrays=(ArrayInfo(name="places", row_shape=(3,), limit=MAX_LEN),),
)
HAS_ROW = StepInput(name="has_row", dtype=torch.int32, dims=(TOKENS,), fill=fill_has_row, advance="same", optional=True)
ROWS = StepInput(
    name="rows",
    dtype=torch.bfloat16,
    dims=(TOKENS, F),
    fill=fill_rows,
    advance="same",
    optional=True,
    arrays=(ArrayInfo(name="rows", row_shape=(F,), is_floating=True),),
)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    with torch.device("meta"):
        module = Seeing().to(dtype)
    module.requires_grad_(False).eval()
    return ModelSpec(
        module=module,
        config=config,
        state=(full_attention([KVCacheSpec(num_kv_heads=H, head_dim=E)] * LAYERS),),
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        buffers={"frequencies": FREQUENCIES},
        inputs=(INPUT_IDS, PLACES, LOGITS_INDICES, HAS_ROW, ROWS),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    register_model("SeeingForTests", build)
    made = tmp_path_factory.mktemp("seeing")
    config = {"architectures": ["SeeingForTests"], "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.3}
    (made / "config.json").write_text(json.dumps(config))
    return made


def image(number: int, height: int, width: int) -> np.ndarray:
    """float32 [height · width, F], bfloat16 values."""
    rows = torch.randn(height * width, F, generator=torch.Generator().manual_seed(number))
    return rows.bfloat16().float().numpy()


def seeing(request_id: str, parts: Sequence[list[int] | tuple[int, int, int]], **params: Any) -> EngineRequest:
    """A request for a prompt of texts (token ids) and images (number, height, width).

    The places of an image's tokens, and of the one behind it, come with the image; those of texts go on from there.
    """
    token_ids: list[int] = []
    media: list[MediaItem] = []
    place = 0
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            place += len(part)
            continue
        number, height, width = part
        start, length = len(token_ids), height * width
        grid = [(place, place + y, place + x) for y in range(height) for x in range(width)]
        place += max(height, width)
        arrays = {
            "rows": StepArray.of(torch.from_numpy(image(number, height, width)).bfloat16(), start=start),
            "places": StepArray.of(np.array([*grid, (place,) * 3]).T, axis=1, start=start),
        }
        media.append(MediaItem(key=f"image {part}".encode(), position=start, length=length, arrays=arrays))
        token_ids += [IMAGE] * length
    one = request(request_id, token_ids, **params)
    one.media = media
    return one


TEXT = [prompt_of(i, 12 + 5 * i) for i in range(4)]


def mixed() -> list[EngineRequest]:
    return [
        seeing("text", [TEXT[0]], max_tokens=30),
        seeing("middle", [TEXT[1], (1, 3, 4), TEXT[2]], max_tokens=30),
        seeing("first", [(2, 2, 5), TEXT[3]], max_tokens=30),
        seeing("last", [TEXT[2], (3, 4, 4)], max_tokens=30),
        seeing("three", [TEXT[0], (1, 3, 4), [9, 10], (4, 1, 1), (2, 2, 5), [11]], max_tokens=30),
    ]


def expected_tokens(core: EngineCore, one: EngineRequest) -> list[int]:
    """Greedy tokens of the plain module, which computes the whole sequence again for each."""
    spec = core.executor.worker.loaded.model.spec  # type: ignore[attr-defined]
    sequence = list(one.prompt_token_ids)
    while len(sequence) < len(one.prompt_token_ids) + (one.sampling_params.max_tokens or 0):
        count = len(sequence)
        places = np.tile(np.arange(count), (3, 1))
        has_row, rows = np.zeros(count, dtype=np.int32), np.zeros((count, F), dtype=np.float32)
        for item in one.media:
            array, place = item.arrays["rows"], item.arrays["places"]
            has_row[array.start : array.end], rows[array.start : array.end] = 1, array.rows(array.start, array.end)
            known = place.rows(place.start, place.end)
            places[:, place.start :] = np.concatenate((known, known[-1] + np.arange(1, count + 1)[:, None]))[: count - place.start].T
        made = make_step(
            spec.inputs,
            spec.state,
            [(0, count)],
            state=zero_state(spec.state, 1, {KV_CACHES: count}, torch.float32),
            tokens_per_page={KV_CACHES: count},
            token_ids=np.array(sequence),
        )
        inputs = made.inputs | {
            "places": torch.from_numpy(places),
            "has_row": torch.from_numpy(has_row),
            "rows": torch.from_numpy(rows).bfloat16(),
        }
        arguments = {group.name: group.argument(made.state) for group in spec.state}
        with torch.no_grad(), running(made.metadata):
            sequence.append(int(spec.module(**inputs, **arguments)[-1].argmax()))
    return sequence[len(one.prompt_token_ids) :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    core = EngineCore(tiny_config(folder))
    tokens = {one.request_id: expected_tokens(core, one) for one in mixed()}
    core.shutdown()
    assert len({tuple(one[:8]) for one in tokens.values()}) == len(tokens)
    return tokens


@pytest.mark.exhaustive
def test_it_compiles_with_a_plain_plan_and_every_pass_is_verified() -> None:
    config = CompileConfig(use_cache=False, verify_passes=True)
    model = compile_model(build({}, torch.float32), config, device=torch.device("cpu"), dtype=torch.float32)
    assert isinstance(model, CompiledModel)
    fill(model)
    for row in model.report["passes"]:
        assert "failed" not in str(row.get("skipped", "")), row
    assert model.plain_plan is not None
    assert {"has_row", "rows"} <= set(model.plan.arguments)
    assert not {"has_row", "rows"} & set(model.plain_plan.arguments)
    assert not any("projector" in name for name in model.plain_plan.arguments)
    assert model.report["pieces_of_plain_plan"] == 1  # the one before the first layer's attention; the others are shared


def count_plans(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the steps of each plan from now on."""
    counts: Counter[str] = Counter()
    runner = core.executor.worker.runner  # type: ignore[attr-defined]
    assert runner.steps is not runner.plain_steps
    for name, steps in (("full", runner.steps), ("plain", runner.plain_steps)):

        def run(step: Any, *, steps_run: Any = steps.run, plan: str = name, **options: Any) -> Any:
            counts[plan] += 1
            return steps_run(step, **options)

        monkeypatch.setattr(steps, "run", run)
    return counts


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["0"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_it_serves_the_tokens_of_the_plain_module(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images cut by chunks, and steps that mix images, texts and decodes; from a fresh compilation and from its artifact."""
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1} if drafts else None
    for artifact in ("made", "hit"):
        options: dict[str, Any] = {"enforce_eager": False, "cache_dir": tmp_path, "max_num_batched_tokens": 9}
        core = EngineCore(tiny_config(folder, **options, speculative_config=speculative))
        assert core.info.compile_report["artifact"] == artifact
        counts = count_plans(core, monkeypatch)
        assert tokens_of(run_requests(core, mixed())) == expected
        assert counts["full"] >= 5
        assert counts["plain"] > counts["full"]
        if drafts:
            assert core.stats().spec_decode_num_draft_tokens > 20
        counts.clear()
        run_requests(core, [seeing("only text", [TEXT[3]])])
        assert counts["full"] == 0
        core.shutdown()


def num_cached(outputs: dict[str, list[RequestOutput]]) -> dict[str, int]:
    return {name: steps[0].num_cached_tokens for name, steps in outputs.items()}


def test_prefixes_end_where_images_differ(folder: Path) -> None:
    core = EngineCore(tiny_config(folder))
    text, end = TEXT[1][:10], TEXT[2]
    first = run_requests(core, [seeing("a", [text, (1, 3, 4), end])])
    again = run_requests(core, [seeing("b", [text, (1, 3, 4), end])])
    assert num_cached(first)["a"] == 0
    assert num_cached(again)["b"] == (10 + 12 + len(end) - 1) // 4 * 4
    assert tokens_of(again)["b"] == tokens_of(first)["a"]
    for others, found in (
        ([text, (2, 3, 4), end], 8),  # another image
        ([text, (1, 4, 3), end], 8),  # another size
        ([text, [IMAGE] * 12, end], 8),  # no image
        ([text[:8], (1, 3, 4), end], 8),  # another place
        ([text, (1, 3, 4), end[:2], (2, 1, 2)], 24),  # the same image, and another behind it
        ([text, (1, 3, 4), end, tokens_of(first)["a"], (2, 3, 4), [5]], 56),  # the next turn, with an image
    ):
        one = seeing("c", others)
        outputs = run_requests(core, [one])
        assert num_cached(outputs)["c"] == found, others
        assert tokens_of(outputs)["c"] == expected_tokens(core, one)
    core.shutdown()


def test_preemptions_change_no_token(folder: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(folder, max_num_batched_tokens=24, max_model_len=100, num_kv_blocks=30))
    assert tokens_of(run_requests(core, mixed())) == expected
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


@pytest.mark.slow
def test_decode_steps_are_captured(folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs of the plain plan, whose steps the device advances."""
    pytest.importorskip("triton")
    made: list[CudaGraphRunner] = []

    def graph_runners(config: Any, spec: Any, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
        options: dict[str, Any] = {"mode": "full", "max_num_seqs": 8, "backends": [], "device": FakeDevice(), "sizes": (1, 2, 4, 8)}
        made.extend(CudaGraphRunner(plan, **options, decode_head=begin_step, decode_tail=end_step) for plan in plans)
        return GraphRunners(made)

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    core = EngineCore(tiny_config(folder, enforce_eager=False, cache_dir=tmp_path, max_num_seqs=8))
    for runner in made:
        runner.capture()
    assert tokens_of(run_requests(core, mixed())) == expected
    assert len(made) == 2
    assert made[0].stats.replays["full"] == 0
    assert made[1].stats.replays["full"] > 20
    assert core.stats().steps_on_device > 20
    core.shutdown()


def test_it_is_used_offline(folder: Path, expected: dict[str, list[int]]) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with LLM(str(folder), load_format="dummy", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, device="cpu") as llm:
        prompts: list[Any] = [{"prompt_token_ids": one.prompt_token_ids, "media": one.media} for one in mixed()]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        with pytest.raises(ValueError, match="cannot be truncated"):
            llm.generate(prompts[1:2], msgspec.structs.replace(greedy, truncate_prompt_tokens=3))
    assert [output.outputs[0].token_ids for output in outputs] == list(expected.values())


def test_arrays_and_media_cross_processes() -> None:
    one = seeing("a", [TEXT[1], (1, 3, 4), TEXT[2]])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(AddRequest(one)), type=ToEngine)
    assert isinstance(received, AddRequest)
    assert received.request == one
    contents = received.request.contents()
    assert contents is not None
    arrays = contents.all_arrays()
    assert np.array_equal(arrays["rows"][0].rows(len(TEXT[1]), len(TEXT[1]) + 12), image(1, 3, 4))


def test_ranks_get_the_arrays_of_new_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step as a rank in another process receives it."""
    core = EngineCore(tiny_config(folder))
    expected = tokens_of(run_requests(core, [mixed()[4]]))
    core.shutdown()
    core = EngineCore(tiny_config(folder))
    launch = core.executor.launch

    def launch_received(scheduled: SchedulerOutput) -> Any:
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(RunStep(scheduled)), type=ToRank)
        assert isinstance(received, RunStep)
        return launch(received.scheduled)

    monkeypatch.setattr(core.executor, "launch", launch_received)
    assert tokens_of(run_requests(core, [mixed()[4]])) == expected
    core.shutdown()


def test_wrong_arrays_are_refused_and_others_go_on(folder: Path) -> None:
    core = EngineCore(tiny_config(folder))
    wrong = seeing("wrong", [TEXT[0], (1, 3, 4)])
    wrong.step_arrays["rows"] = StepArray.of(np.zeros((2, F + 1), dtype=np.float32))
    with pytest.raises(ValueError, match=r"The array 'rows' has float32 rows of shape \[7\]: the model reads floating rows of shape \[6\]"):
        core.add_request(wrong)
    assert len(tokens_of(run_requests(core, [seeing("right", [TEXT[0]])]))["right"]) == 16
    core.shutdown()


class NeedsRows(Seeing):
    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        places: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        has_row: Any,
        rows: Any,
    ) -> torch.Tensor:
        return super().forward(input_ids, places, kv_caches, logits_indices, has_row, rows)


def test_a_model_must_do_without_its_optional_inputs() -> None:
    spec = build({}, torch.float32)
    with torch.device("meta"):
        object.__setattr__(spec, "module", NeedsRows())
    with pytest.raises(ValueError, match="The model's input has_row is optional: its forward must take has_row=None"):
        compile_model(spec, CompileConfig(use_cache=False), device=torch.device("cpu"), dtype=torch.float32)
