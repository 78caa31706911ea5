"""On a CUDA device: steps that run ahead of their drafts' tokens change no token, greedy or drawn, with captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.drafting.ngram_drafts import NgramDrafts
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.support.drafters import check_every_draft
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

pytestmark = pytest.mark.gpu

K = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {},
    {"temperature": 1.1, "seed": 2, "top_p": 0.9},
    {"temperature": 0.7, "seed": 3, "top_k": 20},
]


def given_requests() -> list[EngineRequest]:
    return [request(f"q{i}", prompt_of(i, 5 + 7 * i), max_tokens=40 + 9 * i, **options) for i, options in enumerate(OPTIONS)]


def engine(folder: Path, **options: Any) -> EngineCore:
    core = EngineCore(
        tiny_config(
            folder,
            device="cuda",
            block_size=16,
            num_kv_blocks=256,
            max_num_seqs=8,
            attention_backend="triton",
            enforce_eager=False,
            **options,
        )
    )
    while core.idle():  # capture all graphs
        pass
    return core


def test_tokens_are_those_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, given = write_tiny_model(tmp_path / "tiny"), given_requests()
    plain = engine(folder)
    expected = tokens_of(run_requests(plain, given))
    plain.shutdown()
    check_every_draft(monkeypatch)
    texts = {one.request_id: [*one.prompt_token_ids, *expected[one.request_id], *[0] * K] for one in given}

    def answers(self: NgramDrafts, num_seqs: int, num_drafts: int, size: int, *, is_ahead: bool) -> None:
        """With an error at every fifth position."""
        asked, names = self._asked.device, {held.slot: name for name, held in self._batch._requests.items()}
        slots, counts = asked["slots"].tolist(), asked["counts"].tolist()
        for slot, count, position in list(zip(slots, counts, self._known_positions().tolist(), strict=True))[:num_seqs]:
            places = range(position + 1, position + 1 + count)
            tokens = [texts[names[slot]][place] ^ (place % 5 == 0) for place in places]
            self.drafts[slot, :count] = self.drafts.new_tensor(tokens)

    monkeypatch.setattr(NgramDrafts, "_make_drafts", answers)
    core = engine(folder, speculative_config={"method": "ngram", "num_speculative_tokens": K})
    steps_before = core.stats().steps_on_device
    assert tokens_of(run_requests(core, given)) == expected
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens > 0.4 * stats.spec_decode_num_draft_tokens > 60
    assert stats.steps_on_device - steps_before > 20
    core.shutdown()
