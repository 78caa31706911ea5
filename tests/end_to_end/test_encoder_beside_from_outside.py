"""A model with images whose encoder runs beside it, declared and registered from outside. The encoder's rows replace the embeddings of
placeholder tokens: the tokens are those of the same rows brought by the request. Ranks find the model as a plug-in: this module.

Shape legend: T tokens of the step, B tokens of an image, D hidden size, H heads, E head size, F features of a patch, R rows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, read_rows, row_numbers
from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.rows import ENCODER_ROWS, EncoderRow
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, KVCacheSpec
from compile_and_serve.custom_ops.step import (
    DECODER_INPUTS,
    SEQUENCES,
    TOKENS,
    StepInput,
    StepOutput,
    TokenBatch,
    current_metadata,
    running,
)
from compile_and_serve.custom_ops.step_data import ArrayInfo, MediaItem, StepArray
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.runner.media_encoder import MediaEncoder
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import fill, zero_state
from tests.test_plugins import install

ARCHITECTURE = "LooksForTests"
VOCAB, D, H, E, F, LAYERS = 320, 32, 2, 16, 6, 2
IMAGE = 7  # the placeholder's token
MAX_LEN, MAX_IMAGE = 256, 24


def _both_ways(q_THE: torch.Tensor, k_THE: torch.Tensor, v_THE: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q kᵀ · scale) v within each image."""
    out_THE = torch.zeros_like(q_THE)
    lengths = current_metadata(SEQUENCES)
    starts = lengths.query_start_loc.tolist()
    for begin, end in pairwise(starts[: lengths.num_seqs + 1]):
        q_HBE, k_HBE, v_HBE = (x_THE[begin:end].transpose(0, 1) for x_THE in (q_THE, k_THE, v_THE))
        out_THE[begin:end] = functional.scaled_dot_product_attention(q_HBE, k_HBE, v_HBE, scale=scale).transpose(0, 1)
    return out_THE


BOTH_WAYS = define(
    "test_within_images(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q, k, v, scale: torch.empty_like(q),
    sharding=Sharding(inputs={"q": 1, "k": 1, "v": 1}, output=1),
    CompositeExplicitAutograd=_both_ways,
)


class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_THE, v_THE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        return x_TD + self.o(BOTH_WAYS(q_THE, k_THE, v_THE, E**-0.5).flatten(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(F, D, bias=False)
        self.places = nn.Embedding(MAX_IMAGE, D)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))

    def forward(self, patches: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x_TD = self.patch(patches.to(self.patch.weight.dtype)) + self.places(positions)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return x_TD


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x_TD: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        q_THE, k_THE, v_THE = (linear(y_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        return x_TD + self.o(attention(q_THE, k_THE, v_THE, cache, E**-0.5, KV_CACHES).flatten(1))


class Looking(nn.Module):
    """forward without `encoder_row`: no token is of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, D), nn.Embedding(MAX_LEN, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        images: list[torch.Tensor],
        logits_indices: torch.Tensor,
        encoder_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embedding(input_ids)
        if encoder_row is not None:
            x_TD = torch.where(encoder_row[:, None] > 0, read_rows(images[0], encoder_row), x_TD)
        x_TD = x_TD + self.places(positions)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x_TD = layer(x_TD, cache)
        return self.head(x_TD[logits_indices])


def fill_patches(batch: TokenBatch) -> np.ndarray:
    return batch.with_rows_of("patches", np.zeros((len(batch.token_ids), F), dtype=np.float32))


PATCHES = StepInput(
    name="patches",
    dtype=torch.bfloat16,
    dims=(TOKENS, F),
    fill=fill_patches,
    arrays=(ArrayInfo(name="patches", row_shape=(F,), is_floating=True),),
)
POSITIONS = DECODER_INPUTS[1]
PLAN: dict[str, Any] = {f"layers.*.{name}": "colwise" for name in "qkv"} | {"layers.*.o": "rowwise"}


def on_meta(module: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return module().to(dtype).requires_grad_(False).eval()


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    encoder = ModelSpec(
        module=on_meta(Encoder, dtype),
        config=config,
        state=(),
        vocab_size=1,
        max_model_len=MAX_IMAGE,
        inputs=(PATCHES, POSITIONS),
        outputs=(StepOutput(name="rows", dims=(TOKENS, D)),),
        tp_plan=PLAN,
    )
    return ModelSpec(
        module=on_meta(Looking, dtype),
        config=config,
        state=(
            full_attention([KVCacheSpec(num_kv_heads=H, head_dim=E)] * LAYERS),
            StateGroup(name="images", layers=(EncoderRow(width=D, dtype=dtype),), kind=ENCODER_ROWS),
        ),
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        inputs=(*DECODER_INPUTS, ENCODER_ROW),
        tp_plan=PLAN,
        encoder=encoder,
    )


register_model(ARCHITECTURE, build)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder. Processes find the model, because this module is installed as a plug-in."""
    site, made = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("looking")
    install(site, "looking", {"compile_and_serve.models": {"looking": __name__}})
    config = {"architectures": [ARCHITECTURE], "vocab_size": VOCAB, "eos_token_id": 2, "initializer_range": 0.3}
    (made / "config.json").write_text(json.dumps(config | {"num_attention_heads": H, "hidden_size": D}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        yield made


def image(number: int, length: int) -> torch.Tensor:
    """bfloat16 [B, F]"""
    return torch.randn(length, F, generator=torch.Generator().manual_seed(number)).bfloat16()


def looking(request_id: str, parts: Sequence[list[int] | tuple[int, int]], **params: Any) -> EngineRequest:
    """A request for a prompt of texts (token ids) and images (number, length)."""
    token_ids: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, list):
            token_ids += part
            continue
        start, length = len(token_ids), part[1]
        arrays = {"patches": StepArray.of(image(*part), start=start)}
        media.append(MediaItem(key=f"image {part}".encode(), position=start, length=length, arrays=arrays))
        token_ids += [IMAGE] * length
    one = request(request_id, token_ids, **{"max_tokens": 20} | params)
    one.media = media
    return one


TEXT = [prompt_of(i, 9 + 5 * i) for i in range(4)]
MIXED: dict[str, list[list[int] | tuple[int, int]]] = {
    "text": [TEXT[0]],
    "middle": [TEXT[1], (1, 12), TEXT[2]],
    "first": [(2, 10), TEXT[3]],
    "last": [TEXT[2], (3, 24)],
    "same": [TEXT[3], (1, 12), TEXT[0]],
    "three": [TEXT[0], (1, 12), [9, 10], (4, 1), (2, 10), [11]],
}


def mixed() -> list[EngineRequest]:
    return [looking(name, parts) for name, parts in MIXED.items()]


def rows_of_image(encoder: ModelSpec, number: int, length: int) -> torch.Tensor:
    """[B, D]: the encoder's rows, from its plain module."""
    made = make_step(encoder.inputs, (), [(0, length)], state={}, tokens_per_page={})
    inputs = made.inputs | {"patches": image(number, length)}
    with torch.no_grad(), running(made.metadata):
        return encoder.module(**inputs)


def expected_tokens(core: EngineCore, one: EngineRequest, parts: Sequence[list[int] | tuple[int, int]]) -> list[int]:
    """Greedy tokens of the plain modules, which compute the whole sequence again for each. The rows come with the request."""
    loaded = core.executor.worker.loaded  # type: ignore[attr-defined]
    spec, encoder = loaded.model.spec, loaded.encoder.model.spec
    rows_RD, read = [torch.zeros(1, D)], [0] * len(one.prompt_token_ids)
    for item, part in zip(one.media, [part for part in parts if isinstance(part, tuple)], strict=True):
        begin = sum(map(len, rows_RD))
        rows_RD.append(rows_of_image(encoder, *part))
        read[item.position : item.position + item.length] = range(begin, begin + item.length)
    sequence = list(one.prompt_token_ids)
    while len(sequence) < len(one.prompt_token_ids) + (one.sampling_params.max_tokens or 0):
        count = len(sequence)
        state = zero_state(spec.paged_state, 1, {KV_CACHES: count}, torch.float32)
        made = make_step(
            spec.inputs, spec.paged_state, [(0, count)], state=state, tokens_per_page={KV_CACHES: count}, token_ids=np.array(sequence)
        )
        inputs = made.inputs | {"encoder_row": torch.tensor(read + [0] * (count - len(read)))}
        caches = spec.paged_state[0].argument(made.state)
        with torch.no_grad(), running(made.metadata):
            sequence.append(int(spec.module(**inputs, kv_caches=caches, images=[torch.cat(rows_RD)])[-1].argmax()))
    return sequence[len(one.prompt_token_ids) :]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    core = EngineCore(tiny_config(folder))
    tokens = {one.request_id: expected_tokens(core, one, MIXED[one.request_id]) for one in mixed()}
    core.shutdown()
    assert len({tuple(one[:8]) for one in tokens.values()}) == len(tokens)
    return tokens


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the items that were encoded since the test began, in order."""
    lengths: list[int] = []
    encode = MediaEncoder.encode

    def counting(self: MediaEncoder, items: Any) -> None:
        lengths.extend(item.length for item in items)
        encode(self, items)

    monkeypatch.setattr(MediaEncoder, "encode", counting)
    return lengths


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_both_compile_and_every_pass_is_verified(tensor_parallel_size: int) -> None:
    spec = build({}, torch.float32)
    assert spec.encoder is not None
    for one in (spec, spec.encoder):
        config = CompileConfig(use_cache=False, verify_passes=True, tensor_parallel_size=tensor_parallel_size)
        model = compile_model(one, config, device=torch.device("cpu"), dtype=torch.float32)
        assert isinstance(model, CompiledModel)
        if tensor_parallel_size == 1:
            fill(model)
        for row in model.report["passes"]:
            assert "failed" not in str(row.get("skipped", "")), row
        if one is spec:
            assert model.plain_plan is not None
            assert "encoder_row" not in model.plain_plan.arguments


def test_rows_of_an_item_lie_in_its_pages() -> None:
    assert row_numbers([2, 0], 18).tolist() == [*range(33, 49), 1, 2]


@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_are_those_of_rows_that_come_with_the_request(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], encoded: list[int], drafts: int
) -> None:
    """Images cut by chunks, and steps that mix images, texts and decodes; from a fresh compilation and from artifacts."""
    speculative = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1} if drafts else None
    for artifact in ("made", "hit"):
        options: dict[str, Any] = {"enforce_eager": False, "cache_dir": tmp_path, "max_num_batched_tokens": 9, "max_encoder_tokens": 64}
        core = EngineCore(tiny_config(folder, **options, speculative_config=speculative))
        report = core.info.compile_report
        assert report["artifact"] == report["encoder.artifact"] == artifact
        encoded.clear()
        assert tokens_of(run_requests(core, mixed())) == expected
        assert Counter(encoded) == {12: 1, 10: 1, 24: 1, 1: 1}  # each image once, for all who have it
        core.shutdown()


def test_a_finished_requests_rows_are_found_again(folder: Path, expected: dict[str, list[int]], encoded: list[int]) -> None:
    core = EngineCore(tiny_config(folder))
    for name in ("middle", "same"):
        assert tokens_of(run_requests(core, [looking(name, MIXED[name])]))[name] == expected[name]
    assert encoded == [12]
    salted = looking("same", MIXED["same"])
    salted.cache_salt = "another tenant"
    assert tokens_of(run_requests(core, [salted]))["same"] == expected["same"]
    assert encoded == [12, 12]
    core.shutdown()


def test_a_prefix_hit_behind_an_image_encodes_nothing(folder: Path, encoded: list[int]) -> None:
    core = EngineCore(tiny_config(folder))
    first = run_requests(core, [looking("a", [TEXT[1], (1, 12), TEXT[2]])])
    core._scheduler.encoder.forget()  # type: ignore[union-attr]
    outputs = run_requests(core, [looking("b", [TEXT[1], (1, 12), TEXT[2]])])
    assert outputs["b"][0].num_cached_tokens > len(TEXT[1]) + 12
    assert tokens_of(outputs)["b"] == tokens_of(first)["a"]
    assert encoded == [12]
    core.shutdown()


def check_rows_are_free(core: EngineCore) -> None:
    encoder = core._scheduler.encoder
    assert encoder is not None
    assert encoder.pool.num_free == encoder.pool.num_blocks
    assert not encoder._held


def test_preempted_requests_find_their_rows(folder: Path, expected: dict[str, list[int]], encoded: list[int]) -> None:
    options = {"max_num_batched_tokens": 24, "max_encoder_tokens": 64, "enable_prefix_caching": False}
    core = EngineCore(tiny_config(folder, max_model_len=100, num_kv_blocks=26, **options))
    assert tokens_of(run_requests(core, mixed())) == expected
    assert core.stats().num_preemptions > 0
    assert Counter(encoded) == {12: 1, 10: 1, 24: 1, 1: 1}
    check_rows_are_free(core)
    core.shutdown()


def test_the_budget_and_the_region_bound_what_is_encoded(folder: Path, encoded: list[int]) -> None:
    """More images than the region has room for: all requests end with their own tokens, and no step exceeds the budget."""
    core = EngineCore(tiny_config(folder, max_encoder_tokens=24))
    info = core.executor.info.encoder
    assert info is not None
    assert (info.max_tokens, info.max_item_tokens, info.num_pages * info.rows_per_page) == (24, 24, 48)
    requests = {f"r{i}": [TEXT[i % 4], (10 + i, 5 + i), TEXT[0], (40 + i % 3, 24)] for i in range(12)}
    run = [looking(name, parts, max_tokens=6) for name, parts in requests.items()]
    want = {one.request_id: expected_tokens(core, one, requests[one.request_id]) for one in run}
    sums: list[int] = []
    encode = MediaEncoder.encode

    def summing(self: MediaEncoder, items: Any) -> None:
        sums.append(sum(item.length for item in items))
        encode(self, items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaEncoder, "encode", summing)
        assert tokens_of(run_requests(core, run)) == want
    assert max(sums) <= 24
    assert len(sums) > 12
    check_rows_are_free(core)
    core.shutdown()


def test_aborted_requests_give_their_rows_back(folder: Path) -> None:
    core = EngineCore(tiny_config(folder, max_num_batched_tokens=8))
    core.add_request(looking("a", [[5], (1, 24)]))
    core.step()
    assert core._scheduler.encoder._held  # type: ignore[union-attr]
    core.abort(["a"])
    while core.has_work():
        core.step()
    check_rows_are_free(core)
    core.shutdown()


def test_it_sleeps_and_wakes(folder: Path, expected: dict[str, list[int]], encoded: list[int]) -> None:
    core = EngineCore(tiny_config(folder))
    weights = core.executor.worker.loaded.weights  # type: ignore[attr-defined]
    run_requests(core, mixed())
    for level in (1, 2):
        encoded.clear()
        core.sleep(level)
        core.wake_up()
        assert tokens_of(run_requests(core, mixed())) == expected
        assert len(encoded) == 4  # the rows were forgotten
    held = {storage.data_ptr() for storage in weights._storages}
    encoder = core.executor.worker.loaded.encoder.model  # type: ignore[attr-defined]
    assert {tensor.untyped_storage().data_ptr() for tensor in encoder.weight_memory()} <= held
    core.shutdown()


def test_rows_are_those_without_graphs(folder: Path, tmp_path: Path) -> None:
    """The fourth step of a bucket captures its graphs; other lengths in the bucket replay them."""
    core = EngineCore(tiny_config(folder, enforce_eager=False, cache_dir=tmp_path, max_encoder_tokens=64))
    loaded = core.executor.worker.loaded  # type: ignore[attr-defined]
    side, spec, info = loaded.encoder, loaded.spec, loaded.encoder_info
    graphs = CudaGraphRunner(side.model, mode="piecewise", max_num_seqs=1, max_tokens=64, backends=(), device=FakeDevice())
    replaying, plain = (MediaEncoder(side, steps, spec, info, torch.device("cpu")) for steps in (graphs, PlainRunner(side.model)))
    for number, lengths in enumerate([(12,), (4, 9), (10,), (13,), (14,), (5, 4, 3), (11,)]):
        arrays = [{"patches": StepArray.of(image(10 * number + i, one), start=0)} for i, one in enumerate(lengths)]
        items = [EncodeItem(request_id="", position=0, length=lengths[i], page_ids=[i], arrays=one) for i, one in enumerate(arrays)]
        for encoder in (replaying, plain):
            encoder.encode(items)
        torch.testing.assert_close(replaying.state, plain.state)
        assert graphs.stats.replays["piecewise"] == max(0, number - 2)
    core.shutdown()


@pytest.mark.parametrize("mode", ["piecewise", "none"])
def test_graphs_are_captured_in_idle_moments_and_after_sleep(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    module = "compile_and_serve.runtime.runner.cuda_graphs"
    monkeypatch.setattr(f"{module}.CudaGraphs", lambda _: FakeDevice())
    monkeypatch.setattr(f"{module}.platform_of", lambda _: SimpleNamespace(replays_graphs=True))
    dummies, run_dummy = list[int](), MediaEncoder.run_dummy
    monkeypatch.setattr(MediaEncoder, "run_dummy", lambda self, count: (dummies.append(count), run_dummy(self, count)))
    options: dict[str, Any] = {"enforce_eager": False, "cache_dir": tmp_path, "max_num_batched_tokens": 9, "max_encoder_tokens": 64}
    core = EngineCore(tiny_config(folder, cudagraph_mode=mode, **options))
    worker = core.executor.worker  # type: ignore[attr-defined]
    for level in (1, 2, 1):
        graphs = worker._graphs
        assert dummies == [MAX_IMAGE]  # the warm-up
        assert (graphs is None) == (mode == "none")
        if graphs is not None:
            sizes = [1, 2, 4, *range(8, 65, 8)]
            assert graphs.estimate_bytes(9, 0, 64) > graphs.estimate_bytes(9, 0) + 10 * len(sizes)
            while worker.idle():
                pass
            assert dummies[1:] == sizes[::-1]
            assert graphs.encoder._piecewise._captured.keys() == set(sizes)
        assert tokens_of(run_requests(core, mixed())) == expected
        core.sleep(level)
        dummies.clear()
        core.wake_up()
    core.shutdown()


def test_two_ranks(folder: Path, tmp_path: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(folder, cache_dir=tmp_path, tensor_parallel_size=2, max_num_batched_tokens=24))
    assert tokens_of(run_requests(core, mixed())) == expected
    core.shutdown()


def test_what_cannot_be_encoded_is_refused(folder: Path) -> None:
    core = EngineCore(tiny_config(folder))
    cut = looking("cut", [TEXT[0], (1, 12)])
    cut.media = [MediaItem(key=b"cut", position=9, length=12, arrays={"patches": StepArray.of(image(1, 11), start=9)})]
    for wrong, sentence in (
        (looking("long", [(1, MAX_IMAGE + 1)]), "has 25 tokens, but the encoder reads 24 at most: make it smaller"),
        (cut, "must have a row for each of its tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            core.add_request(wrong)
    alone = looking("alone", [TEXT[0]])
    alone.step_arrays["patches"] = StepArray.of(image(1, 3))
    with pytest.raises(ValueError, match="must come with a media item"):
        core.add_request(alone)
    core.shutdown()
    with pytest.raises(ValueError, match="one item may have 24 tokens: raise --max-encoder-tokens"):
        EngineCore(tiny_config(folder, max_encoder_tokens=23))
