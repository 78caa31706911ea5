"""The trained EAGLE-3 head drafts for SmolLM2 in the engine: it changes no token, and it is worth its steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.drafting.payoff import Payoff

HEAD = Path(__file__).parents[1] / "support/smollm2_eagle3"
QUESTIONS = Path(__file__).parents[2] / "benchmarks/texts/questions.txt"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plain_answers(smollm2_dir: Path) -> list[list[int]]:
    return answers(smollm2_dir)[0]


def answers(model: Path, num_drafts: int = 0) -> tuple[list[list[int]], float]:
    """Greedy answers to questions that the head has not learned: their tokens, and the tokens of a step of a sequence."""
    drafts = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": num_drafts} if num_drafts else None
    # In float32: rows of a step of drafts are added up in another order than those of a plain step, which bfloat16 would show.
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 4}
    with LLM(str(model), speculative_config=drafts, **options) as llm:
        conversations = [[{"role": "user", "content": question}] for question in QUESTIONS.read_text().splitlines()[::20]]
        given = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
        stats = llm.core.stats()
    accepted = stats.spec_decode_num_accepted_tokens / max(1, stats.spec_decode_num_drafts)
    return [list(one.outputs[0].token_ids) for one in given], 1 + accepted


@pytest.mark.parametrize("num_drafts", [2, 3])
@pytest.mark.exhaustive
def test_a_trained_head(smollm2_dir: Path, plain_answers: list[list[int]], num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # How long drafts are depends on what steps cost here. These are whole in every step, so that each machine sees the same.
    monkeypatch.setattr(Payoff, "is_on", lambda self, num_seqs: True)
    monkeypatch.setattr(
        Payoff, "draft_lengths", lambda self, num_seqs, drafted, max_tokens: {name: count for name, (count, _) in drafted.items()}
    )
    found, tokens_a_step = answers(smollm2_dir, num_drafts)
    assert found == plain_answers
    assert tokens_a_step > 1.6  # a head of random weights has 1.0
