"""Vision-language classes of the transformers package: tiny random checkpoints give the tokens and logits of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("PIL")

import PIL.Image

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner import item_encoder
from tests.support.engines import run_requests, tiny_config
from tests.support.kimi_k25_models import with_experts_in_4_bits
from tests.support.media_reference import check_generated
from tests.support.seeing_classes import CLASSES, TINY
from tests.support.seeing_models import processor_of, reference, seeing_request, video_request, write_seeing
from tests.support.vision_models import FIRST, PROMPTS, QWEN, SECOND, TEXT, Parts, picture

QUICK = ("llava_next", "qwen2_vl", "gemma3")
WHOLE_PROMPTS = ("paligemma", "paligemma2")  # which a step computes at once
CUT = [name for name in CLASSES if name not in WHOLE_PROMPTS]


class Checkpoint:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.model = write_seeing(name, folder)
        self.processor = processor_of(name, folder)
        self._backend = {"attention_backend": "torch"} if name == "kimi_k25" else {}  # latent attention is not in the interpreter

    def engine(self, **options: Any) -> EngineCore:
        with pytest.MonkeyPatch.context() as patch:
            if CLASSES[self.name].by_hand is not None:  # transformers' own needs torchvision
                patch.setattr(item_encoder, "media_processor", lambda info: self.processor)
            return EngineCore(
                tiny_config(
                    self.folder, **{"load_format": "auto", "skip_tokenizer_init": True, "max_num_seqs": 8} | self._backend | options
                )
            )

    def check(self, core: EngineCore, prompts: dict[str, Parts]) -> None:
        """All prompts at once give what transformers generates for each."""
        made = [seeing_request(name, parts, self.processor) for name, parts in prompts.items()]
        check_generated(core, made, partial(reference, self.model, self.processor))


@pytest.fixture(scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CUT])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.exhaustive_cases
def test_tokens_and_logits_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """0, 1 and 3 images of different sizes; chunks cut them; all at once."""
    core = checkpoint.engine(max_num_batched_tokens=21)
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.exhaustive_cases
def test_prefixes_end_where_images_differ(checkpoint: Checkpoint) -> None:
    core = checkpoint.engine()
    turn: Parts = [TEXT[2], FIRST, TEXT[1]]
    checkpoint.check(core, {"a": turn})
    length = len(seeing_request("a", turn, checkpoint.processor)[0].prompt_token_ids)
    for number, (parts, cached) in enumerate(((turn, (length - 1) // 4 * 4), ([TEXT[2], SECOND, TEXT[1]], len(TEXT[2]) // 4 * 4))):
        one, images = seeing_request(f"b{number}", parts, checkpoint.processor)
        steps = run_requests(core, [one])[one.request_id]
        assert steps[0].num_cached_tokens == cached
        tokens = [token for step in steps for token in step.new_token_ids]
        assert tokens == reference(checkpoint.model, checkpoint.processor, one, images)[0]
    core.shutdown()


@pytest.mark.exhaustive_cases
def test_videos(checkpoint: Checkpoint) -> None:
    if CLASSES[checkpoint.name].video is None:
        assert set(checkpoint.processor.placeholders.values()) == {"image"}
        return
    core = checkpoint.engine(max_num_batched_tokens=21)
    frames = np.stack([picture(20 + i, 40, 24) for i in range(7)])
    one, inputs = video_request(checkpoint.processor, frames)
    steps = run_requests(core, [one])[one.request_id]
    core.shutdown()
    tokens, logprobs = reference(checkpoint.model, checkpoint.processor, one, (), inputs)
    assert [token for step in steps for token in step.new_token_ids] == tokens
    assert [entry.logprobs[0] for step in steps for entry in step.new_logprobs or ()] == pytest.approx(logprobs, abs=1e-3)


def test_images_offline_go_through_the_folders_processor(tmp_path: Path) -> None:
    checkpoint = Checkpoint("llava_next", tmp_path)
    parts: Parts = [TEXT[2], FIRST, TEXT[1]]
    one, images = seeing_request("a", parts, checkpoint.processor)
    expected = reference(checkpoint.model, checkpoint.processor, one, images)[0]
    (token,) = checkpoint.processor.placeholders
    first = next(index for index, found in enumerate(one.prompt_token_ids) if found == token)
    ids = [*one.prompt_token_ids[: first + 1], *one.prompt_token_ids[first + one.media[0].length :]]
    with LLM(str(tmp_path), dtype="float32", enforce_eager=True, device="cpu", num_kv_blocks=128, num_threads=1) as llm:
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": images[0]}}
        [result] = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True), use_tqdm=False)
        wrong = {**prompt, "mm_processor_kwargs": {"x": 1}}
        with pytest.raises(ValueError, match="for the whole server alone"):
            llm.generate(wrong, use_tqdm=False)
    assert result.prompt_token_ids == one.prompt_token_ids
    assert result.outputs[0].token_ids == expected


@pytest.mark.exhaustive
def test_compiled(tmp_path: Path) -> None:
    checkpoint = Checkpoint("llava_next", tmp_path)
    core = checkpoint.engine(enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=21)
    assert core.info.compile_report["encoder.reason"] == "transformers' encoder reads sizes of images and audio on the host"
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.exhaustive
def test_native_encoder_compiled(tmp_path: Path) -> None:
    checkpoint = Checkpoint("kimi_k25", tmp_path)
    core = checkpoint.engine(enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=21)
    assert "encoder.reason" not in core.info.compile_report
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.slow
def test_kimi_as_published_with_experts_in_4_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint("kimi_k25", tmp_path / "model")
    with_experts_in_4_bits(tmp_path / "model", tmp_path / "plain", tmp_path / "published")
    checkpoint.model = type(checkpoint.model).from_pretrained(tmp_path / "plain", dtype=torch.float32)
    checkpoint.folder, checkpoint.processor = tmp_path / "published", processor_of("kimi_k25", tmp_path / "published")
    core = checkpoint.engine(max_num_batched_tokens=21)
    assert "does not use" not in caplog.text
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.parametrize(("name", "blocks"), [("paligemma", 56), pytest.param("paligemma2", 112, marks=pytest.mark.slow)])
def test_all_tokens_of_a_prompt_attend_to_each_other(name: str, blocks: int, tmp_path: Path) -> None:
    """Few steps' worth of tokens and of blocks, so that prompts wait for room for all of them, and some are preempted."""
    checkpoint = Checkpoint(name, tmp_path)
    core = checkpoint.engine(max_model_len=208, max_num_batched_tokens=216, max_encoder_tokens=108, num_kv_blocks=blocks)
    checkpoint.check(core, PROMPTS)
    assert core.stats().num_preemptions > 0
    four, _ = seeing_request("four", [FIRST, SECOND, FIRST, SECOND, TEXT[0]], checkpoint.processor)
    with pytest.raises(ValueError, match="media have 144 tokens"):
        core.add_request(four)
    core.shutdown()


def test_the_prompt_of_paligemma_is_ordered_as_by_transformers(tmp_path: Path) -> None:
    processor = Checkpoint("paligemma", tmp_path).processor
    processor._end = [9]  # the tokenizer of the tests knows no line break
    media = [processor.image(PIL.Image.new("RGB", (20, 30)), b"")]
    image, bos = processor._token, processor._bos
    for given in ([50, 51], [bos, 50, 51], [image, 50, 51], [image, bos, 50, 51, 9]):
        assert processor.with_placeholders(given, media) == [image, bos, 50, 51, 9]
    assert processor.with_placeholders([bos, 50], []) == [bos, 50]
    assert media[0].tokens == [image] * 36


def test_a_class_that_reads_text_alone(caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.Qwen3VLConfig(text_config=QWEN["qwen3"][1] | TINY).to_dict()
    architecture = "Qwen3VLForConditionalGeneration"
    spec = build_model({**config, "architectures": [architecture]}, dtype=torch.float32, model_impl="transformers")
    assert spec.encoder is None
    assert f"{architecture} runs on text alone" in caplog.text
    assert "deepstack_visual_embeds" in caplog.text
