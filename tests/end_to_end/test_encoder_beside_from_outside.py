"""A model with images whose encoder runs beside it, declared and registered from outside. The encoder's rows replace the embeddings of
placeholder tokens: the tokens are those of the same rows brought by the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.encoder_rows import row_numbers
from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.media_encoder import MediaEncoder
from tests.support.engines import run_requests, tiny_config, tokens_of
from tests.support.looking_model import (
    MAX_IMAGE,
    MIXED,
    TEXT,
    build,
    expected_of_mixed,
    expected_tokens,
    image,
    looking,
    looking_folder,
    mixed,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with looking_folder(tmp_path_factory) as made:
        yield made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return expected_of_mixed(folder)


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


@pytest.mark.exhaustive
def test_both_compile_and_every_pass_is_verified() -> None:
    spec = build({}, torch.float32)
    assert spec.encoder is not None
    for one in (spec, spec.encoder):
        config = CompileConfig(use_cache=False, verify_passes=True, tensor_parallel_size=2)
        model = compile_model(one, config, device=torch.device("cpu"), dtype=torch.float32)
        assert isinstance(model, CompiledModel)
        for row in model.report["passes"]:
            assert "failed" not in str(row.get("skipped", "")), row
        if one is spec:
            assert model.plain_plan is not None
            assert "encoder_row" not in model.plain_plan.arguments


def test_rows_of_an_item_lie_in_its_pages() -> None:
    assert row_numbers([2, 0], 18).tolist() == [*range(33, 49), 1, 2]


@pytest.mark.slow
def test_tokens_are_those_of_rows_that_come_with_the_request(
    folder: Path, tmp_path: Path, expected: dict[str, list[int]], encoded: list[int]
) -> None:
    """Images cut by chunks, and steps that mix images, texts and decodes; from a fresh compilation, and from artifacts with drafts."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    for artifact, speculative in (("made", None), ("hit", ngrams)):
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
    ledgers = [next(output.ledger for output in one if output.ledger is not None) for one in (first["a"], outputs["b"])]
    assert [ledger.encode > 0 for ledger in ledgers] == [True, False]
    assert [ledger.encoded_items for ledger in ledgers] == [1, 1]
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
