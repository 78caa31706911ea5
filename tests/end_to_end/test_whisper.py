"""Whisper: tiny random checkpoints give the tokens of transformers' class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.whisper_models import greedy, item_of, speech_request, write_whisper

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


@pytest.mark.slow
def test_compiled_and_on_two_ranks(model: tuple[Path, Any]) -> None:
    folder, reference = model
    for options in ({"enforce_eager": False}, {"tensor_parallel_size": 2}):
        core = EngineCore(tiny_config(folder, **OPTIONS, **options))
        assert tokens_of(run_requests(core, requests())) == expected(reference)
        core.shutdown()
