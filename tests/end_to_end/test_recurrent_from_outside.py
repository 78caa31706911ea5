"""A hybrid from outside of the package: attention, and a recurrent kind of state larger than a page, with snapshots and rollback.

A layer's memory S_t = decay · S_{t-1} + k_t v_tᵀ is read by q_t S_t. What is kept of a sequence is a checkpoint, S as it was after `place`
tokens, and a ring of the keys and values since then, so that the last tokens can be taken back.

Shape legend: T tokens of the step, S sequences, H heads, E head size, R entries of the ring, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState, StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent, SlotMetadata, gather_slot, scatter_slot
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import current_metadata
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice
from tests.support.platforms import OwnMemory
from tests.support.tiny_models import fill, plain_logits

VOCAB, D, E, LAYERS = 320, 48, 16, 2
ATTENTION_HEADS, MEMORY_HEADS = 4, 6
RING, ROLLBACK = 24, 8
DECAY = 0.8

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Memory(LayerState):
    """S, keys and values of the ring, and `place`. Ranks share the heads."""

    num_heads: int

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        ring = StateTensor(shape=(self.num_heads, RING, E))
        return StateTensor(shape=(self.num_heads, E, E)), ring, ring, StateTensor(shape=(1, 1), dtype=torch.float32)

    def of_rank(self, mesh: Mesh) -> Memory:
        return replace(self, num_heads=self.num_heads // mesh.tensor)


def _outer_memory(
    q_THE: torch.Tensor,
    k_THE: torch.Tensor,
    v_THE: torch.Tensor,
    memory: torch.Tensor,
    memory_columns: torch.Tensor,
    keys: torch.Tensor,
    key_columns: torch.Tensor,
    values: torch.Tensor,
    value_columns: torch.Tensor,
    place: torch.Tensor,
    place_columns: torch.Tensor,
    decay: float,
    group: str,
) -> torch.Tensor:
    metadata: SlotMetadata = current_metadata(group)
    heads, out_THE = q_THE.shape[1], torch.zeros_like(q_THE)
    memory_SHEE = gather_slot(memory, memory_columns, metadata.read_pages, heads)
    keys_SHRE = gather_slot(keys, key_columns, metadata.read_pages, heads)
    values_SHRE = gather_slot(values, value_columns, metadata.read_pages, heads)
    places_S = gather_slot(place, place_columns, metadata.read_pages, 1)[:, 0, 0]
    starts, computed_S = metadata.query_start_loc.tolist(), metadata.num_computed.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()):
        if not length:
            continue
        computed, first = computed_S[s], 0
        state_HEE = torch.zeros_like(memory_SHEE[s])
        if computed > 0:
            first, state_HEE = min(max(round(places_S[s].item()), computed - RING), computed), memory_SHEE[s].clone()
        # Up to ROLLBACK of the tokens may be taken back by the next step, and as many by what begins from a snapshot.
        checkpoint = max(first, (length - 2 * ROLLBACK) // ROLLBACK * ROLLBACK, 0)
        for t in range(first, length):
            if t == checkpoint:
                memory_SHEE[s], places_S[s] = state_HEE, t
            token = starts[s] + t - computed
            if t >= computed:
                keys_SHRE[s, :, t % RING], values_SHRE[s, :, t % RING] = k_THE[token].to(keys.dtype), v_THE[token].to(keys.dtype)
            state_HEE = decay * state_HEE + keys_SHRE[s, :, t % RING, :, None] * values_SHRE[s, :, t % RING, None]
            if t >= computed:
                out_THE[token] = torch.einsum("he,hef->hf", q_THE[token].to(keys.dtype), state_HEE).to(q_THE.dtype)
    scatter_slot(memory_SHEE, memory, memory_columns, metadata.write_pages)
    scatter_slot(keys_SHRE, keys, key_columns, metadata.write_pages)
    scatter_slot(values_SHRE, values, value_columns, metadata.write_pages)
    scatter_slot(places_S[:, None, None], place, place_columns, metadata.write_pages)
    return out_THE


OUTER_MEMORY = define(
    "test_outer_memory(Tensor q, Tensor k, Tensor v, Tensor(a!) memory, Tensor memory_columns, Tensor(b!) keys, Tensor key_columns, "
    "Tensor(c!) values, Tensor value_columns, Tensor(d!) place, Tensor place_columns, float decay, str group) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q_THE, *_: torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device),
    sharding=Sharding(
        inputs={"q": 1, "k": 1, "v": 1},
        output=1,
        state={"memory_columns": (0, "q"), "key_columns": (0, "q"), "value_columns": (0, "q")},
        must_shard=True,
    ),
    CompositeExplicitAutograd=_outer_memory,
)


class Mixer(nn.Module):
    """Attention and memory side by side; attention may be left out."""

    def __init__(self, *, has_attention: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        if has_attention:
            self.attention_q, self.attention_k, self.attention_v = (nn.Linear(D, ATTENTION_HEADS * E, bias=False) for _ in range(3))
            self.attention_out = nn.Linear(ATTENTION_HEADS * E, D, bias=False)
        self.memory_q, self.memory_k, self.memory_v = (nn.Linear(D, MEMORY_HEADS * E, bias=False) for _ in range(3))
        self.memory_out = nn.Linear(MEMORY_HEADS * E, D, bias=False)

    def remember(self, x_TD: torch.Tensor, memory: Sequence[Pair]) -> torch.Tensor:
        q, k, v = (linear(x_TD).view(x_TD.shape[0], -1, E) for linear in (self.memory_q, self.memory_k, self.memory_v))
        read = OUTER_MEMORY(torch.tanh(q), torch.tanh(k), v, *memory[0], *memory[1], *memory[2], *memory[3], DECAY, "memories")
        return self.memory_out(read.flatten(1))

    def attend(self, x_TD: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x_TD).view(x_TD.shape[0], -1, E) for linear in (self.attention_q, self.attention_k, self.attention_v))
        return self.attention_out(attention(q, k, v, cache, E**-0.5).flatten(1))


class Hybrid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Mixer(has_attention=True) for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        memories: list[tuple[Pair, ...]],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        x_TD = self.embedding(input_ids)
        for layer, cache, memory in zip(self.layers, kv_caches, memories, strict=True):
            y_TD = layer.norm(x_TD)
            x_TD = x_TD + layer.attend(y_TD, cache) + layer.remember(y_TD, memory)
        return self.head(x_TD[logits_indices])


class OnlyMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Mixer(has_attention=False) for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, memories: list[tuple[Pair, ...]], logits_indices: torch.Tensor
    ) -> torch.Tensor:
        x_TD = self.embedding(input_ids)
        for layer, memory in zip(self.layers, memories, strict=True):
            x_TD = x_TD + layer.remember(layer.norm(x_TD), memory)
        return self.head(x_TD[logits_indices])


MEMORIES = StateGroup(
    name="memories", layers=(Memory(num_heads=MEMORY_HEADS),) * LAYERS, kind=Recurrent(snapshots=True, rollback_tokens=ROLLBACK)
)
CACHES = full_attention([KVCacheSpec(num_kv_heads=ATTENTION_HEADS, head_dim=E)] * LAYERS)


def build(module_type: type[nn.Module], state: tuple[StateGroup, ...], config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    with torch.device("meta"):
        module = module_type().to(dtype)
    module.requires_grad_(False).eval()
    plan = {f"layers.*.{mixer}_{part}": "colwise" for mixer in ("attention", "memory") for part in "qkv"}
    plan |= {"layers.*.attention_out": "rowwise", "layers.*.memory_out": "rowwise"}
    return ModelSpec(module=module, config=config, state=state, vocab_size=VOCAB, max_model_len=256, tp_plan=plan)


def build_hybrid(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return build(Hybrid, (CACHES, MEMORIES), config, dtype)


def build_only_memory(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    return build(OnlyMemory, (MEMORIES,), config, dtype)


def write_folder(folder: Path, architecture: str) -> Path:
    config = {"architectures": [architecture], "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_model("HybridForTests", build_hybrid)
    return write_folder(tmp_path_factory.mktemp("hybrid"), "HybridForTests")


@pytest.fixture(scope="module")
def only_memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    register_model("OnlyMemoryForTests", build_only_memory)
    return write_folder(tmp_path_factory.mktemp("only-memory"), "OnlyMemoryForTests")


class Reference:
    """The greedy tokens of the plain module, which computes the whole sequence again for each."""

    def __init__(self, folder: Path) -> None:
        self.core = EngineCore(tiny_config(folder))
        self.spec = self.core.executor.worker.loaded.model.spec  # type: ignore[attr-defined]
        self._next: dict[tuple[int, ...], int] = {}  # a text → its next token: tests ask for the same texts

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        sequence = list(prompt)
        for _ in range(count):
            text = tuple(sequence)
            if text not in self._next:
                self._next[text] = int(plain_logits(self.spec, sequence, torch.float32)[-1].argmax())
            sequence.append(self._next[text])
        return sequence[len(prompt) :]

    def check(self, requests: Sequence[EngineRequest], outputs: dict[str, list[RequestOutput]]) -> None:
        served = tokens_of(outputs)
        for one in requests:
            assert served[one.request_id] == self.tokens(one.prompt_token_ids, one.sampling_params.max_tokens), one.request_id


@pytest.fixture(scope="module")
def reference(hybrid: Path) -> Iterator[Reference]:
    made = Reference(hybrid)
    yield made
    made.core.shutdown()


def num_cached(outputs: list[RequestOutput]) -> int:
    return max(output.num_cached_tokens for output in outputs)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


@pytest.mark.slow
def test_it_compiles_and_every_pass_is_verified() -> None:
    spec = build_hybrid({}, torch.float32)
    config = CompileConfig(use_cache=False, verify_passes=True, tensor_parallel_size=2)
    model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32)
    fill(model)
    for row in model.report["passes"]:
        assert "failed" not in str(row.get("skipped", "")), row
    assert next(row for row in model.report["passes"] if row["name"] == "tensor_parallel")["matched"] > 0


def test_a_layer_is_larger_than_a_page(reference: Reference) -> None:
    pages = reference.core.executor.worker.loaded.pages  # type: ignore[attr-defined]
    assert pages.page_bytes < MEMORY_HEADS * E * E * 4
    assert pages.pages_per_slot == {"memories": LAYERS * (2 + 3 + 3)}  # 4 heads of S, or 2 of a ring, in a page; `place` is behind others


@pytest.fixture
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines run on a device that shares the host's memory, or has its own."""
    register_platform("cpu", request.param)
    yield
    register_platform("cpu", CpuPlatform)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifacts")


@pytest.mark.slow
@pytest.mark.exhaustive_cases
@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("memory", "speculative_config"),
    [(CpuPlatform, None), pytest.param(OwnMemory, None, marks=pytest.mark.slow), (OwnMemory, NGRAM)],
    indirect=["memory"],
)
def test_turns_and_branches_reuse_their_prefix(
    hybrid: Path, reference: Reference, cache_dir: Path, speculative_config: dict[str, Any] | None
) -> None:
    options = {"max_num_batched_tokens": 16, "speculative_config": speculative_config}
    core = EngineCore(tiny_config(hybrid, enforce_eager=False, cache_dir=cache_dir, **options))
    document = prompt_of(1, 43)
    first = request("first", document, max_tokens=12)
    outputs = run_requests(core, [first])
    reference.check([first], outputs)
    assert num_cached(outputs["first"]) == 0
    history = [*document, *tokens_of(outputs)["first"]]
    for turn in (2, 3):
        one = request(f"turn {turn}", [*history, *prompt_of(turn, 9)], max_tokens=10)
        outputs = run_requests(core, [one])
        reference.check([one], outputs)
        assert num_cached(outputs[one.request_id]) >= len(history) - 8  # the last blocks may be taken back
        history = [*one.prompt_token_ids, *tokens_of(outputs)[one.request_id]]
    branches = [request(f"branch {i}", [*document, *prompt_of(10 + i, 6 + i)], max_tokens=8) for i in range(3)]
    for one in branches:
        outputs = run_requests(core, [one])
        reference.check([one], outputs)
        assert num_cached(outputs[one.request_id]) == 40 or one is branches[0]
    together = [request(f"again {i}", one.prompt_token_ids, max_tokens=8) for i, one in enumerate(branches)]
    outputs = run_requests(core, together)
    reference.check(together, outputs)
    assert all(num_cached(outputs[one.request_id]) >= 40 for one in together)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


@pytest.mark.parametrize("speculative_config", [None, NGRAM])
def test_batches_chunks_and_preemptions(hybrid: Path, reference: Reference, speculative_config: dict[str, Any] | None) -> None:
    options = {"max_num_batched_tokens": 24, "max_model_len": 160, "speculative_config": speculative_config}
    core = EngineCore(tiny_config(hybrid, num_kv_blocks=75, **options))
    prompts = [prompt_of(i, 2 + 9 * i)[: 4 + 4 * i] * 2 for i in range(6)]
    requests = [request(f"r{i}", prompt, max_tokens=60) for i, prompt in enumerate(prompts)]
    outputs = run_requests(core, requests)
    reference.check(requests, outputs)
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_preemptions > 0
    if speculative_config is not None:
        assert stats.spec_decode_num_draft_tokens > stats.spec_decode_num_accepted_tokens  # some are taken back
    core.shutdown()


def test_more_drafts_than_can_be_taken_back_are_refused(hybrid: Path) -> None:
    with pytest.raises(ValueError, match=r"8 tokens at most can be removed from the model's state \(memories\), but .* is 9"):
        EngineCore(tiny_config(hybrid, speculative_config=NGRAM | {"num_speculative_tokens": 9}))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(("memory", "query_len"), [(CpuPlatform, 1), (OwnMemory, 4)], indirect=["memory"])
def test_steps_are_captured(hybrid: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, query_len: int) -> None:
    core, made = captured_core(hybrid, monkeypatch, query_len)
    prompts = [prompt_of(i, 5 + 3 * i) * 2 for i in range(3)]
    requests = [request(f"r{i}", prompt, max_tokens=32) for i, prompt in enumerate(prompts)]
    reference.check(requests, run_requests(core, requests))
    assert made[-1].stats.replays["full"] > 3
    if query_len == 1:
        assert core.stats().steps_on_device > 3
    core.shutdown()


def test_a_model_without_tokens_in_pages_advances_on_the_device(only_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Reference(only_memory)
    core, _ = captured_core(only_memory, monkeypatch, 1)
    requests = [request(f"r{i}", prompt_of(i, 5 + 3 * i), max_tokens=24) for i in range(3)]
    reference.check(requests, run_requests(core, requests))
    assert core.stats().steps_on_device > 3
    again = [request(f"again {i}", one.prompt_token_ids, max_tokens=24) for i, one in enumerate(requests)]
    outputs = run_requests(core, again)
    reference.check(again, outputs)
    assert num_cached(outputs["again 2"]) > 0
    core.shutdown()
    reference.core.shutdown()


def captured_core(folder: Path, monkeypatch: pytest.MonkeyPatch, query_len: int) -> tuple[EngineCore, list[CudaGraphRunner]]:
    """A core whose steps of decodes replay fake graphs. query_len: 1, or 1 and the drafts of each."""
    pytest.importorskip("triton")
    made: list[CudaGraphRunner] = []

    def graph_runners(config: Any, spec: Any, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
        device = FakeDevice()
        common: dict[str, Any] = {"mode": "full", "max_num_seqs": 8, "backends": [], "device": device, "sizes": (1, 2, 4, 8)}
        heads = {"decode_head": begin_step, "decode_tail": end_step}
        made.extend(CudaGraphRunner(plans[0], query_len=q, **common, **heads) for q in sorted({1, query_len}))
        return GraphRunners(made[:1], made[1] if query_len > 1 else None)

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    options = {"speculative_config": NGRAM} if query_len > 1 else {}
    core = EngineCore(tiny_config(folder, max_num_seqs=8, attention_backend="torch", **options))
    for runner in made:
        runner.capture()
    return core, made


def test_state_dtype_and_the_offline_api(hybrid: Path) -> None:
    prompts: list[Any] = [{"prompt_token_ids": prompt_of(i, 20)} for i in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    for state_dtype in ("auto", "bfloat16"):
        with LLM(
            str(hybrid), load_format="dummy", dtype="float32", block_size=4, skip_tokenizer_init=True, device="cpu", enforce_eager=True,
            state_dtype=state_dtype,
        ) as llm:  # fmt: skip
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
            assert outputs == [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)]
