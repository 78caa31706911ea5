"""Whisper: tiny random checkpoints give the tokens of transformers' class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_and_serve.runtime.audio.alignment import token_rows
from compile_and_serve.runtime.audio.speech_tokens import ALIGNMENT_REFUSED
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.runner.generation_files import with_generation_files
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.whisper_models import ALIGNMENT_HEADS, ROWS, cross_attention, greedy, item_of, speech_request, token_times, write_whisper

OPTIONS: dict[str, Any] = {"load_format": "auto", "skip_tokenizer_init": True}
LONG = [3, *range(20, 60)]  # a prompt that steps of 24 tokens cut
PROMPTS = {"a": ([3, 7, 9], 0), "b": ([3], 1), "c": (LONG, 2), "d": (LONG[:20], 0), "e": (LONG, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("whisper")
    return folder, write_whisper(folder)


def requests(count: int = 20, **params: Any) -> list[EngineRequest]:
    return [speech_request(name, prompt, number, max_tokens=count, **params) for name, (prompt, number) in PROMPTS.items()]


def expected(model: Any, count: int = 20) -> dict[str, list[int]]:
    return {name: greedy(model, prompt, number, count) for name, (prompt, number) in PROMPTS.items()}


def test_tokens_are_those_of_transformers_and_equal_items_are_encoded_once(model: tuple[Path, Any]) -> None:
    """Chunks cut a prompt; a prefix is found for the same speech, and not for another."""
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, max_num_batched_tokens=24))
    wanted = expected(reference)
    assert tokens_of(run_requests(core, requests())) == wanted
    assert core._scheduler.encoder is not None
    assert core._scheduler.encoder.num_encoded == 3
    again = run_requests(core, requests())
    assert tokens_of(again) == wanted
    assert core._scheduler.encoder.num_encoded == 3
    assert {name: max(step.num_cached_tokens for step in steps) for name, steps in again.items()} == {
        name: (len(prompt) - 1) // 4 * 4 for name, (prompt, _) in PROMPTS.items()
    }
    with pytest.raises(ValueError, match="must bring what the encoder reads"):
        core.add_request(request("none", [3]))
    core.shutdown()


def test_preemption_changes_no_token(model: tuple[Path, Any]) -> None:
    """A cache of so few blocks that requests lose theirs, and encoder rows too."""
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, max_model_len=72, num_kv_blocks=46))
    assert tokens_of(run_requests(core, requests(28))) == expected(reference, 28)
    assert core._scheduler.stats().num_preemptions > 0
    core.shutdown()


def test_items_in_the_prompt_are_refused(model: tuple[Path, Any]) -> None:
    import msgspec

    core = EngineCore(tiny_config(model[0], **OPTIONS))
    one = speech_request("a", [3] * 40, 0)
    one.media = [msgspec.structs.replace(item_of(0), is_beside=False)]
    with pytest.raises(ValueError, match="beside the prompt"):
        core.add_request(one)
    core.shutdown()


def aligned(core: EngineCore) -> dict[str, np.ndarray]:
    """What the tokens of `PROMPTS` attend to: [tokens but the last, heads, 20]"""
    found = run_requests(core, requests(1, prompt_logprobs=0, aligned_rows=20))
    entries = {name: [one for step in steps for one in step.prompt_logprobs or ()] for name, steps in found.items() if name != "b"}
    return {
        name: np.stack([np.frombuffer(one.attention, np.float32).reshape(-1, 20) for one in several[1:] if one is not None])
        for name, several in entries.items()
    }


def test_weights_of_alignment_heads_are_those_of_transformers(model: tuple[Path, Any]) -> None:
    """Of prompts that steps cut, too. Models without such heads, and engines that do not compute them, say why."""
    folder, reference = model
    core = EngineCore(tiny_config(folder, **OPTIONS, max_num_batched_tokens=24))
    for name, weights_TAR in aligned(core).items():
        prompt, number = PROMPTS[name]
        wanted_TAR = cross_attention(reference, prompt, number)[:-1, :, :20]
        np.testing.assert_allclose(weights_TAR, wanted_TAR, rtol=1e-4, atol=1e-6)
        times = token_times(reference, prompt[:-1], number, begin=1, num_rows=20)
        np.testing.assert_allclose(token_rows(weights_TAR[1:]) * 0.02, times, atol=1e-6)
    with pytest.raises(ValueError, match="asks for aligned rows"):
        core.add_request(request("none", [3], aligned_rows=ROWS + 1))
    core.shutdown()


@pytest.mark.parametrize(
    ("options", "reason"), [({}, None), ({"tensor_parallel_size": 2}, "tensor parallel size of 1"), ({"kv_cache_dtype": "int8"}, "int8")]
)
def test_who_computes_no_times_of_words_says_why(model: tuple[Path, Any], options: dict[str, Any], reason: str | None) -> None:
    config = json.loads((model[0] / "config.json").read_text())
    found = with_generation_files(config, tiny_config(model[0], **OPTIONS, **options))
    assert found.get("alignment_heads") == (ALIGNMENT_HEADS if reason is None else None)
    assert (reason or "") in found.get(ALIGNMENT_REFUSED, "")


@pytest.mark.slow
def test_compiled_and_on_two_ranks(model: tuple[Path, Any]) -> None:
    folder, reference = model
    for options in ({"enforce_eager": False}, {"tensor_parallel_size": 2}):
        core = EngineCore(tiny_config(folder, **OPTIONS, **options))
        assert tokens_of(run_requests(core, requests())) == expected(reference)
        if "enforce_eager" in options:
            prompt, number = PROMPTS["c"]
            wanted_TAR = cross_attention(reference, prompt, number)[:-1, :, :20]
            np.testing.assert_allclose(aligned(core)["c"], wanted_TAR, rtol=1e-4, atol=1e-6)
        core.shutdown()
