"""Qwen2.5-VL and Qwen3-VL, dense and with experts: tiny random checkpoints give the tokens and logits of transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.attention.encoder_attention import _starts_on_device
from compile_and_serve.custom_ops.step import SEQUENCES, running
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.media.qwen_vl import QwenVLProcessor
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.engines import run_requests, tiny_config, tokens_of
from tests.support.tiny_models import fill
from tests.support.vision_models import (
    FIRST,
    MAX_TOKENS,
    PROMPTS,
    QWEN,
    SECOND,
    TEXT,
    Parts,
    engine_request,
    generated,
    picture,
    video_request,
    write_qwen,
)

pytest.importorskip("PIL")

import PIL.Image


class Checkpoint:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.model = write_qwen(name, folder)
        self.processor = QwenVLProcessor(read_folder_config(folder), lambda text: [30, len(text), 31], has_windows=name == "qwen2_5")

    def engine(self, **options: Any) -> EngineCore:
        return EngineCore(tiny_config(self.folder, load_format="auto", skip_tokenizer_init=True, **options))

    def check(self, core: EngineCore, prompts: dict[str, Parts]) -> None:
        """All prompts at once give what transformers generates for each."""
        requests = [engine_request(name, parts, self.processor) for name, parts in prompts.items()]
        outputs = run_requests(core, requests)
        for one, parts in zip(requests, prompts.values(), strict=True):
            tokens, logprobs = generated(self.model, self.name, one, parts)
            steps = outputs[one.request_id]
            assert [token for step in steps for token in step.new_token_ids] == tokens, one.request_id
            found = [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()]
            assert found == pytest.approx(logprobs, abs=1e-3), one.request_id


@pytest.fixture(scope="module", params=QWEN)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def test_tokens_and_logits_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """Chunks cut images, and steps mix images, texts and decodes."""
    core = checkpoint.engine(max_num_batched_tokens=MAX_TOKENS // 3, max_encoder_tokens=MAX_TOKENS)
    checkpoint.check(core, PROMPTS)
    core.shutdown()


def test_prefixes_end_where_images_differ(checkpoint: Checkpoint) -> None:
    core = checkpoint.engine()
    turn: list[list[int] | tuple[int, int, int]] = [TEXT[2], FIRST, TEXT[1]]
    checkpoint.check(core, {"a": turn})
    length = len(engine_request("a", turn, checkpoint.processor).prompt_token_ids)
    for others, cached in (
        (turn, (length - 1) // 4 * 4),
        ([*turn, SECOND, [5]], length // 4 * 4),  # the next turn's image has other positions than at a prompt's beginning
        ([TEXT[2], (9, *FIRST[1:]), TEXT[1]], (len(TEXT[2]) + 1) // 4 * 4),
    ):
        one = engine_request("b", others, checkpoint.processor)
        steps = run_requests(core, [one])["b"]
        assert steps[0].num_cached_tokens == cached
        assert tokens_of({"b": steps})["b"] == generated(checkpoint.model, checkpoint.name, one, others)[0]
    core.shutdown()


def test_a_video_gives_what_transformers_gives(checkpoint: Checkpoint) -> None:
    """Each two frames are an item of the encoder; chunks cut them."""
    one, inputs = video_request(checkpoint.name, checkpoint.processor)
    assert len(one.media) == (3 if checkpoint.name == "qwen2_5" else 4)
    core = checkpoint.engine(max_num_batched_tokens=7, max_encoder_tokens=MAX_TOKENS)
    steps = run_requests(core, [one])["video"]
    tokens, logprobs = generated(checkpoint.model, checkpoint.name, one, [], inputs)
    assert tokens_of({"video": steps})["video"] == tokens
    assert [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()] == pytest.approx(logprobs, abs=1e-3)
    core.shutdown()


def test_windows_of_a_step_are_counted(tmp_path: Path) -> None:
    """A kernel runs programs for each segment: entries beyond the last window end none."""
    write_qwen("qwen2_5", tmp_path)
    core: Any = EngineCore(tiny_config(tmp_path, load_format="dummy", skip_tokenizer_init=True, max_encoder_tokens=3 * MAX_TOKENS))
    encoder = core.executor.worker.runner.encoder
    processor = QwenVLProcessor(read_folder_config(tmp_path), has_windows=True)
    [item] = processor.image(PIL.Image.fromarray(picture(1, 56, 40)), b"").items  # 7 × 5 blocks, in windows of 2 × 2
    arrays = {name: [array] for name, array in item.arrays.items()}
    for given, windows in (([arrays, arrays], 2 * 4 * 3), ([arrays, {}], 4 * 3 + 9), ([{}], 9)):
        step = encoder._step([35] * len(given), given)
        assert step.metadata[SEQUENCES].num_segments == windows
        ends = step.inputs["window_ends"][:windows].tolist()
        assert ends == sorted({*ends})
        assert ends[-1] == step.num_tokens
        with running(step.metadata):
            starts, longest = _starts_on_device(step.inputs["window_ends"], step.padded_tokens, 4, 4)
        assert (starts.tolist(), longest) == ([0, *(4 * end for end in ends)], 16)
        assert sorted(step.inputs["block_order"].tolist()) == list(range(step.num_tokens))
        assert encoder._steps.run(step).outputs["rows"].isfinite().all()
    core.shutdown()


def test_experts_may_have_their_inputs_first(tmp_path: Path) -> None:
    """As the checkpoints on the Hub have them."""
    model = write_qwen("qwen3_moe", tmp_path, experts_have_inputs_first=True)
    core = EngineCore(tiny_config(tmp_path, load_format="auto", skip_tokenizer_init=True))
    one = engine_request("a", PROMPTS["middle"], QwenVLProcessor(read_folder_config(tmp_path), has_windows=False))
    assert tokens_of(run_requests(core, [one]))["a"] == generated(model, "qwen3_moe", one, PROMPTS["middle"])[0]
    core.shutdown()


@pytest.mark.exhaustive
def test_compiled(checkpoint: Checkpoint, tmp_path: Path) -> None:
    core = checkpoint.engine(enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=24)
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Path) -> None:
    """Each runs the encoder whole, and has its part of the decoder."""
    checkpoint = Checkpoint("qwen3", tmp_path)
    core = checkpoint.engine(enforce_eager=False, cache_dir=tmp_path, tensor_parallel_size=2, max_num_batched_tokens=24)
    checkpoint.check(core, {name: PROMPTS[name] for name in ("text", "three")})
    core.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_every_pass_is_verified(name: str, tmp_path: Path) -> None:
    write_qwen(name, tmp_path)
    spec = build_model(read_folder_config(tmp_path), dtype=torch.float32)
    assert spec.encoder is not None
    for one in (spec, spec.encoder):
        config = CompileConfig(use_cache=False, verify_passes=True)
        model = compile_model(one, config, device=torch.device("cpu"), dtype=torch.float32)
        fill(model)
        for row in model.report["passes"]:
            assert "failed" not in str(row.get("skipped", "")), row
