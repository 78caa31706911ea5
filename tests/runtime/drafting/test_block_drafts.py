"""DFlash block drafters beside what `test_heads.py` says of all drafters: compiled, on two ranks, and those that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from tests.runtime.drafting.test_heads import LLAMA, random_tensors, record_drafts, requests, target_tensors, write_model
from tests.support import dflash
from tests.support.drafters import check_every_draft, draft_in_turns
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of

SMALL = {"vocab_size": 8}  # so that some drafts are right


def folders(root: Path, changes: dict[str, Any], drafter: dict[str, Any]) -> tuple[Path, Path]:
    """Of a target and a drafter, whose configs have these changes."""
    target = LLAMA | changes
    return (
        write_model(root / "target", target, target_tensors(target)),
        write_model(root / "drafter", dflash.CONFIG | changes | drafter, random_tensors(dflash.shapes())),
    )


def engine(target: Path, drafter: Path, num_tokens: int = 5, **options: Any) -> EngineCore:
    speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_tokens}
    given = {"load_format": "auto", "max_num_batched_tokens": 64} | options
    return EngineCore(tiny_config(target, speculative_config=speculation, **given))


@pytest.mark.exhaustive
def test_a_compiled_drafter_drafts_the_same(tmp_path: Path, shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = folders(tmp_path, {}, {})
    found = []
    for is_eager in (True, False):
        draft_in_turns(monkeypatch)
        proposed = record_drafts(monkeypatch)
        core = engine(target, drafter, enforce_eager=is_eager, cache_dir=shared_cache_dir)
        found.append((tokens_of(run_requests(core, requests())), proposed))
        core.shutdown()
    assert found[0] == found[1]
    assert len(found[0][1]) > 40


@pytest.mark.exhaustive
def test_two_ranks_draft_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own heads of the block and of the context."""
    check_every_draft(monkeypatch)
    target, drafter = folders(tmp_path, SMALL, {})
    given = [request(f"r{i}", [token % 8 for token in prompt_of(i, 9 + i)], max_tokens=30) for i in range(4)]
    found = []
    for size in (1, 2):
        core = engine(target, drafter, tensor_parallel_size=size, cache_dir=tmp_path / "cache", enforce_eager=size == 1)
        tokens = tokens_of(run_requests(core, given))
        found.append((tokens, core.stats().spec_decode_num_accepted_tokens_per_pos))
        core.shutdown()
    assert found[0] == found[1]
    assert found[0][1][0] > 5


MISFITS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "is a DFlash2DraftModel, but the method dflash takes one of DFlashDraftModel, Qwen3D"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "has layers without full attention, which is not supported: choose another"),
    ({"attention_bias": True}, "has biases in attention, which is not supported"),
    ({"dflash_config": dflash.CONFIG["dflash_config"] | {"causal": True}}, "has a causal mask, which is not supported"),
    ({"dflash_config": {"mask_token_id": 5}}, "must be layers of the model, which has 3, in order, got None"),
    ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 5}}, r"which has 3, in order, got \[0, 3\]"),
    ({"dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 5}}, r"which has 3, in order, got \[1, 0\]"),
    ({"dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 320}}, "must be a token of its vocabulary, got 320"),
    ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 5}}, r"fc.weight .* has shape \[64, 128\]"),
    ({"hidden_size": 32}, "hidden size is 32 and the model's 64: use a drafter that was trained for this model"),
    ({"vocab_size": 100}, "has a vocabulary of 100 tokens and the model one of 320"),
    ({"block_size": 4}, "makes 3 tokens at a time, but num_speculative_tokens is 5: lower it"),
]


@pytest.mark.parametrize(("changes", "message"), MISFITS)
def test_a_drafter_that_does_not_fit_is_one_sentence(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, drafter = folders(tmp_path, {}, changes)
    with pytest.raises(ValueError, match=message) as error:
        engine(target, drafter)
    assert str(error.value).count("\n") == 0
