"""Classes of the transformers package that read speech: tiny random checkpoints give the tokens and logits of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner import item_encoder
from tests.support.engines import run_requests, tiny_config
from tests.support.hearing_models import CLASSES, RATE, Sounds, hearing_request, processor_of, reference, sound, write_hearing
from tests.support.media_reference import check_generated
from tests.support.vision_models import TEXT

QUICK = ("qwen2_audio", "qwen2_5_omni")
PROMPTS: dict[str, Sounds] = {"text": [TEXT[3]], "one": [TEXT[2], 0.7, TEXT[1]], "two": [TEXT[0], 1.31, [11, 12], 0.4, TEXT[3]]}


class Checkpoint:
    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.model = write_hearing(name, folder)
        self.processor = processor_of(name, folder)

    def engine(self, **options: Any) -> EngineCore:
        options = {"load_format": "auto", "skip_tokenizer_init": True, "num_kv_blocks": 2048} | options
        with pytest.MonkeyPatch.context() as patch:
            if CLASSES[self.name].extractor is None:  # transformers' own needs torchaudio
                items = [self.processor.audio(sound(seconds), b"").items[0] for seconds in (0.1, 2.0)]
                patch.setattr(item_encoder, "media_processor", lambda info: self.processor)
                patch.setattr(item_encoder, "_speech_items", lambda processor, limit: items)
            return EngineCore(tiny_config(self.folder, **options))

    def check(self, core: EngineCore, prompts: dict[str, Sounds]) -> None:
        """All prompts at once give what transformers generates for each."""
        made = [hearing_request(name, parts, self.processor) for name, parts in prompts.items()]
        check_generated(core, made, partial(reference, self.model, self.processor))


@pytest.fixture(scope="module", params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CLASSES])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.exhaustive_cases(but=["phi4_multimodal", "voxtral"])
def test_tokens_and_logits_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    """0, 1 and 2 audios of different lengths; chunks cut them; all at once."""
    core = checkpoint.engine(max_num_batched_tokens=21)
    checkpoint.check(core, PROMPTS)
    core.shutdown()


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["qwen2_audio"])
def test_preemption_changes_no_token(checkpoint: Checkpoint) -> None:
    """A cache of so few blocks that requests with audio lose theirs."""
    prompts: dict[str, Sounds] = {f"{name} {again}": parts for again in range(2) for name, parts in PROMPTS.items()}
    longest = max(len(hearing_request(name, parts, checkpoint.processor)[0].prompt_token_ids) for name, parts in prompts.items())
    length = longest + 28
    core = checkpoint.engine(num_kv_blocks=length // 4 + 8, max_model_len=length)
    checkpoint.check(core, prompts)
    assert core._scheduler.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.exhaustive_cases(but=["phi4_multimodal"])
def test_prefixes_end_where_audio_differs(checkpoint: Checkpoint) -> None:
    core = checkpoint.engine()
    turn: Sounds = [TEXT[2], 0.7, TEXT[1]]
    checkpoint.check(core, {"a": turn})
    length = len(hearing_request("a", turn, checkpoint.processor)[0].prompt_token_ids)
    for number, (parts, cached) in enumerate(((turn, (length - 1) // 4 * 4), ([TEXT[2], 0.72, TEXT[1]], len(TEXT[2]) // 4 * 4))):
        one, sounds = hearing_request(f"b{number}", parts, checkpoint.processor)
        steps = run_requests(core, [one])[one.request_id]
        assert steps[0].num_cached_tokens == cached
        tokens = [token for step in steps for token in step.new_token_ids]
        assert tokens == reference(checkpoint.model, checkpoint.processor, one, sounds)[0]
    core.shutdown()


def test_audio_offline(tmp_path: Path) -> None:
    """A file, an array and an array of another rate; a conversation; what is too long."""
    checkpoint = Checkpoint("qwen2_audio", tmp_path)
    one, sounds = hearing_request("a", [TEXT[2], 0.7, TEXT[1]], checkpoint.processor)
    expected = reference(checkpoint.model, checkpoint.processor, one, sounds)[0]
    (token,) = checkpoint.processor.placeholders
    first = one.prompt_token_ids.index(token)
    ids = [*one.prompt_token_ids[: first + 1], *one.prompt_token_ids[first + one.media[0].length :]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", enforce_eager=True, device="cpu", num_kv_blocks=128, num_threads=1) as llm:
        for given in (sounds[0], [sounds[0]], (sounds[0], RATE)):
            [result] = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"audio": given}}, params, use_tqdm=False)
            assert result.prompt_token_ids == one.prompt_token_ids
            assert result.outputs[0].token_ids == expected
        for given, sentence in (
            (sound(2.5), "longer than 2 seconds"),
            ([sounds[0]] * 2, "placeholders of 1 audios"),
            (b"?", "cannot be decoded"),
        ):
            with pytest.raises(ValueError, match=sentence):
                llm.generate({"prompt_token_ids": ids, "multi_modal_data": {"audio": given}}, params, use_tqdm=False)


@pytest.mark.exhaustive
def test_compiled(tmp_path: Path) -> None:
    checkpoint = Checkpoint("qwen2_audio", tmp_path)
    core = checkpoint.engine(enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=21)
    checkpoint.check(core, PROMPTS)
    core.shutdown()


def test_gemma_3n_needs_timm() -> None:
    """Its class cannot be built without the encoder of images."""
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n"}
    with pytest.raises(ModelConfigError, match="requires the timm library"):
        build_model(config, dtype=torch.float32, model_impl="transformers")
