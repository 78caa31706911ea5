"""Drafts that are drawn with the target's random numbers: they change no token, and more of them are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.runtime.drafting.draft_sampling import DraftSampling
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling.ops import sample_unsorted, stream_key, uniforms
from compile_and_serve.runtime.sampling_params import SamplingParams
from tests.support.drafters import check_every_draft
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

OPTIONS: list[dict[str, Any]] = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.02}]


def drawn_requests() -> list[EngineRequest]:
    return [
        request(f"d{i}", prompt_of(i, 5 + 3 * i), max_tokens=30, temperature=1.0, seed=i, **options) for i, options in enumerate(OPTIONS)
    ]


def accepted_of(core: EngineCore) -> tuple[dict[str, list[int]], float]:
    """Tokens, and the share of checked drafts that was accepted."""
    tokens = tokens_of(run_requests(core, drawn_requests()))
    stats = core.stats()
    core.shutdown()
    return tokens, stats.spec_decode_num_accepted_tokens / max(1, stats.spec_decode_num_draft_tokens)


def test_a_drafter_like_its_target_is_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model")
    plain, _ = accepted_of(EngineCore(tiny_config(model)))
    check_every_draft(monkeypatch)
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    drawn, share = accepted_of(EngineCore(tiny_config(model, speculative_config=drafts)))
    likeliest, greedy_share = accepted_of(EngineCore(tiny_config(model, speculative_config=drafts | {"draft_sample_method": "greedy"})))
    assert plain == drawn == likeliest
    # The window of `near_uniform` may prefer a neighbour of a token with little probability.
    assert share > 0.6
    assert share > 1.5 * greedy_share


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_draws_of_like_distributions_agree(place: str) -> None:
    """Also with a vocabulary of the drafter's own."""
    device, count, vocab_size = torch.device(place), 400, 256
    sampling = DraftSampling(1, vocab_size, device)
    sampling.add(0, SamplingParams(temperature=1.0, seed=7), num_prompt=10)
    target = (torch.randn(count, vocab_size) * 2).to(device)
    drafter = target + 0.3 * torch.randn_like(target)
    slots, places = torch.zeros(count, dtype=torch.int64, device=device), torch.arange(10, 10 + count, device=device)
    ids = torch.arange(0, vocab_size, 2, device=device)
    target[:, 1::2] -= 4  # few draws are tokens that the drafter lacks
    if place == "cpu":
        keys = torch.full((count,), stream_key(7), dtype=torch.uint64).numpy()
        numbers = torch.from_numpy(uniforms(keys, places.numpy() - 10))
        tokens, _ = sample_unsorted(target, torch.ones(count, 1), None, numbers[:, None])
    else:
        tokens = sampling.draw(target, slots, places, None)  # as the target's own sampler does
    whole = sampling.draw(drafter, slots, places, None)
    part = sampling.draw(drafter[:, ::2].contiguous(), slots, places, ids)
    likeliest = (drafter.argmax(dim=1) == tokens).float().mean()
    for drafts in (whole, part):
        assert (drafts == tokens).float().mean() > 1.3 * likeliest
    assert bool((part % 2 == 0).all())


def test_greedy_rows_take_the_likeliest_token() -> None:
    sampling = DraftSampling(2, 50, torch.device("cpu"))
    sampling.add(0, SamplingParams(temperature=0.0), num_prompt=3)
    logits = torch.randn(3, 50)
    drafts = sampling.draw(logits, torch.tensor([0, 1, 2]), torch.tensor([4, 5, 6]), None)
    assert drafts.tolist() == logits.argmax(dim=1).tolist()
