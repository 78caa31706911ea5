"""On a CUDA device, with captured graphs: models that draft say what they say in plain steps on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.runtime.drafting.model_drafts import ModelDrafts
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.runtime.drafting.test_heads import METHODS, TARGETS, requests, write_folders, write_model
from tests.runtime.drafting.test_mtp_layers import FAMILIES, with_layers
from tests.support.drafters import check_every_draft
from tests.support.engines import run_requests, tiny_config, tokens_of

pytestmark = pytest.mark.gpu


_propose = ModelDrafts.propose


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], torch.Tensor, torch.Tensor, list[int]]]:
    """Drafts made from now on: the requests, the positions of their last tokens and their drafts, on the device, and how many each was
    asked for. Nothing here waits for the device.
    """
    proposed: list[tuple[list[str], torch.Tensor, torch.Tensor, list[int]]] = []

    def recorded(self: ModelDrafts, last_tokens: Any, wanted: Any, *, is_ahead: bool) -> None:
        _propose(self, last_tokens, wanted, is_ahead=is_ahead)
        slots = self._asked.device["slots"][: len(wanted)]
        positions = self._known_positions()[: len(wanted)].clone()
        proposed.append((list(wanted), positions, self.drafts[slots], [len(draft) for draft in wanted.values()]))

    monkeypatch.setattr(ModelDrafts, "propose", recorded)
    return proposed


def engine(target: Path, speculation: dict[str, Any], *, is_captured: bool) -> EngineCore:
    where = {"device": "cuda", "attention_backend": "triton", "enforce_eager": False} if is_captured else {"attention_backend": "torch"}
    core = EngineCore(
        tiny_config(
            target,
            speculative_config=speculation,
            load_format="auto",
            block_size=16,
            num_kv_blocks=256,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            **where,
        )
    )
    while core.idle():
        pass
    return core


def check(target: Path, speculation: dict[str, Any], given: list[EngineRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    check_every_draft(monkeypatch)
    found: list[dict[tuple[int, ...], list[int]]] = []
    for is_captured in (False, True):
        proposed = record_drafts(monkeypatch)
        core = engine(target, speculation, is_captured=is_captured)
        outputs = tokens_of(run_requests(core, given))
        whole = {one.request_id: [*one.prompt_token_ids, *outputs[one.request_id]] for one in given}
        found.append(
            {
                (count, *whole[name][: position + 1]): draft[:count]
                for names, positions, drafts, counts in proposed
                for name, position, draft, count in zip(names, positions.tolist(), drafts.tolist(), counts, strict=True)
            }
        )
        if is_captured:
            assert core.stats().graph_replays["draft"] > 20
            assert core.stats().steps_on_device > 10
        core.shutdown()
    plain, captured = found
    common = plain.keys() & captured.keys()
    assert len(common) > 30
    assert sum(plain[one] != captured[one] for one in common) <= len(common) // 20  # ties


@pytest.mark.parametrize("method", METHODS)
def test_captured_drafts_are_those_of_plain_steps(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = write_folders(tmp_path)
    speculation: dict[str, Any] = {"method": method.split()[0], "num_speculative_tokens": 1 if method in TARGETS else 3}
    if method in folders:
        speculation["model"] = str(folders[method])
    check(folders[TARGETS[method][0] if method in TARGETS else "llama"], speculation, requests(), monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_several_layers_for_multi_token_prediction(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_model(tmp_path / family, *with_layers(FAMILIES[family]))
    check(target, {"method": "mtp", "num_speculative_tokens": 4}, requests(), monkeypatch)
