"""A method of drafting unlike any of ours, declared and registered from outside: it drafts on the device, and no token changes.

Shape legend: S sequences that get drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.step import INPUT_IDS, LOGITS_INDICES
from compile_and_serve.runtime.drafting import DraftMethod, register_method
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts, DraftSetup, TargetStep
from compile_and_serve.runtime.drafting.method import METHODS
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.drafters import check_every_draft
from tests.support.engines import mixed_requests, run_requests, tiny_config, tokens_of, write_tiny_model

VOCAB = 320


class BigramDrafts(DeviceDrafts):
    """Draft what followed the token last, in any sequence."""

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        self.next_V = torch.zeros(VOCAB, dtype=torch.int64, device=setup.device)

    def follow(self, target: TargetStep, *, keeps_state_only: bool = False) -> None:
        step, sampled = target.step, target.sampled
        if sampled is not None:
            rows = step.inputs[LOGITS_INDICES.name][: len(sampled)]
            self.next_V[step.inputs[INPUT_IDS.name][rows]] = sampled

    def _make_drafts(self, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        tokens_S, drafts = self._last_tokens(num_seqs), []
        for _ in range(num_drafts):
            tokens_S = self.next_V[tokens_S]
            drafts.append(tokens_S)
        self._write_drafts(torch.stack(drafts, dim=1))


@pytest.fixture
def registered() -> Iterator[None]:
    register_method(DraftMethod(name="bigram-for-tests", default_tokens=3, device=lambda: BigramDrafts))
    yield
    del METHODS["bigram-for-tests"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_it_drafts_and_changes_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    plain = EngineCore(tiny_config(folder))
    expected = tokens_of(run_requests(plain, mixed_requests()))
    plain.shutdown()
    check_every_draft(monkeypatch)
    core = EngineCore(tiny_config(folder, speculative_config={"method": "bigram-for-tests"}, async_scheduling=async_scheduling))
    assert tokens_of(run_requests(core, mixed_requests())) == expected
    stats = core.stats()
    assert 10 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
    core.shutdown()
