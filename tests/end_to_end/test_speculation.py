"""Speculation on a trained model: greedy tokens are those without it, up to ties. `--all-prompts` for all 200 prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.llm import RequestOutput
from tests.support.drafters import check_every_draft

TIE = 0.02  # between the two likeliest tokens, in float32
FORMS = (
    "{}", "{} {}", "Repeat this: {}\n{}", "{} And again: {}", "Q: {}\nA:", "# {}\n", "- {}\n- {}\n-", "\"{}\", he said. \"{}",
    "In short: {}", "{}\n\n{}\n\n",
)  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_tokens_are_those_without_drafts(
    method: str,
    smollm2_dir: Path,
    prompts: list[list[int]],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}
    with LLM(str(smollm2_dir), **options) as llm:
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
        asked = [form.format(text, text) for form in FORMS for text in texts]
        assert len(asked) == 200
        if not request.config.getoption("--all-prompts"):
            asked = asked[::7]  # of every form
        plain = llm.generate(asked, GREEDY, use_tqdm=False)
    check_every_draft(monkeypatch)
    with LLM(str(smollm2_dir), speculative_config={"method": method}, **options) as llm:
        drafted = llm.generate(asked, GREEDY, use_tqdm=False)
        stats = llm.engine.core.stats()
    assert stats.spec_decode_num_accepted_tokens > 5 * len(asked)
    assert_equal_up_to_ties(drafted, plain)


@pytest.mark.slow
def test_its_first_layers_draft_for_a_model(
    smollm2_dir: Path, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((smollm2_dir / "config.json").read_text())
    for file in smollm2_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 20}))
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts[:3]]
    with LLM(str(smollm2_dir), **options) as llm:
        plain = llm.generate(given, GREEDY, use_tqdm=False)
    check_every_draft(monkeypatch)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with LLM(str(smollm2_dir), speculative_config=speculation, **options) as llm:
        drafted = llm.generate(given, GREEDY, use_tqdm=False)
        stats = llm.engine.core.stats()
    assert stats.spec_decode_num_accepted_tokens > 5
    assert_equal_up_to_ties(drafted, plain)


def assert_equal_up_to_ties(drafted: list[RequestOutput], plain: list[RequestOutput]) -> None:
    ties = 0
    for with_drafts, without in zip(drafted, plain, strict=True):
        got, expected = with_drafts.outputs[0], without.outputs[0]
        if got.token_ids == expected.token_ids:
            continue
        at = next(i for i, pair in enumerate(zip(got.token_ids, expected.token_ids, strict=True)) if pair[0] != pair[1])
        assert expected.logprobs is not None
        chances = expected.logprobs[at]
        assert got.token_ids[at] in chances, with_drafts.prompt
        gap = chances[expected.token_ids[at]].logprob - chances[got.token_ids[at]].logprob
        assert gap < TIE, f"token {at} behind {with_drafts.prompt!r}: {gap:.4f} apart"
        ties += 1
    assert ties <= 4
