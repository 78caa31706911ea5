"""Mllama: tiny random checkpoints give the tokens and logits of transformers' class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import run_requests, tiny_config
from tests.support.media_reference import check_generated
from tests.support.mllama_models import mllama_request, processor_of, reference, write_mllama
from tests.support.vision_models import FIRST, SECOND, TEXT, THIRD, Parts

OPTIONS: dict[str, Any] = {"load_format": "auto", "skip_tokenizer_init": True, "num_kv_blocks": 2000, "max_num_seqs": 8}
PROMPTS: dict[str, Parts] = {
    "text": [TEXT[3]],
    "first": [FIRST, TEXT[2]],
    "last": [TEXT[1], SECOND],
    "middle": [TEXT[2], THIRD, TEXT[1]],
    "two": [TEXT[0], FIRST, [11, 12], SECOND, TEXT[3]],
    "together": [TEXT[0], SECOND, FIRST, THIRD, TEXT[1], FIRST, TEXT[2]],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("mllama")
    return folder, write_mllama(folder)


def check(core: EngineCore, checkpoint: tuple[Path, Any], prompts: dict[str, Parts], **params: Any) -> None:
    """All prompts at once give what transformers generates for each."""
    folder, model = checkpoint
    processor = processor_of(folder)
    made = [mllama_request(name, parts, processor, **params) for name, parts in prompts.items()]
    check_generated(core, made, partial(reference, model, folder))


def test_tokens_and_logits_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    """0 to 4 images of different sizes; chunks cut the prompts; all at once."""
    core = EngineCore(tiny_config(checkpoint[0], **OPTIONS, max_num_batched_tokens=21))
    check(core, checkpoint, PROMPTS)
    encoded = core._scheduler.encoder.num_encoded
    assert encoded == 4  # each alone, and three together
    check(core, checkpoint, {"text": PROMPTS["text"], "two": PROMPTS["two"]})
    assert core._scheduler.encoder.num_encoded == encoded
    core.shutdown()


def test_prefixes_end_where_images_differ(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    core = EngineCore(tiny_config(folder, **OPTIONS))
    check(core, checkpoint, {"a": [TEXT[2], FIRST, TEXT[1]]})
    processor = processor_of(folder)
    for number, (parts, cached) in enumerate((([TEXT[2], FIRST, TEXT[1]], 20), ([TEXT[2], SECOND, TEXT[1]], len(TEXT[2]) // 4 * 4))):
        one, _ = mllama_request(f"b{number}", parts, processor)
        assert run_requests(core, [one])[one.request_id][0].num_cached_tokens == cached
    core.shutdown()


@pytest.mark.slow
def test_preemption_changes_no_token(checkpoint: tuple[Path, Any]) -> None:
    """A request with seven images leaves few blocks for the others, which lose theirs."""
    core = EngineCore(tiny_config(checkpoint[0], **OPTIONS | {"num_kv_blocks": 340}, max_model_len=128))
    prompts: dict[str, Parts] = {"many": [TEXT[0], *((number, 60, 60) for number in range(7))]}
    prompts |= {f"{number}": [*([FIRST] if number == 2 else []), TEXT[3], [20 + number]] for number in range(5)}
    check(core, checkpoint, prompts, max_tokens=60)
    assert core._scheduler.stats().num_preemptions > 0
    core.shutdown()


@pytest.mark.exhaustive
def test_compiled_and_on_two_ranks(checkpoint: tuple[Path, Any]) -> None:
    """Text alone runs the plan without the layers that read images."""
    prompts = {name: PROMPTS[name] for name in ("text", "two")}
    for options in ({"enforce_eager": False}, {"tensor_parallel_size": 2}):
        core = EngineCore(tiny_config(checkpoint[0], **OPTIONS, **options))
        check(core, checkpoint, prompts)
        core.shutdown()
