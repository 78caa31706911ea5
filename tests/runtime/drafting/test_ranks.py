"""Two ranks that share a model: both learn from the scheduler which drafts were accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.drafters import use_oracle
from tests.support.engines import VOCAB_SIZE, mixed_requests, run_requests, tiny_config, tokens_of, write_tiny_model


@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_a_step_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    plain = EngineCore(tiny_config(folder))
    expected = tokens_of(run_requests(plain, mixed_requests()))
    plain.shutdown()
    use_oracle(monkeypatch, mixed_requests(), expected, VOCAB_SIZE)
    config = {"method": "ngram", "num_speculative_tokens": 4}
    core = EngineCore(tiny_config(folder, speculative_config=config, tensor_parallel_size=2, cache_dir=tmp_path / "cache"))
    assert tokens_of(run_requests(core, mixed_requests())) == expected
    assert core.stats().spec_decode_num_accepted_tokens > 50
    core.shutdown()
