"""Speculation on a trained model: greedy tokens are those without it, up to ties. `--all-prompts` for all 200 prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.llm.llm import RequestOutput
from tests.support.drafters import check_every_draft

TIE = 0.02  # between the two likeliest tokens, in float32
FORMS = (
    "{}",
    "{} {}",
    "Repeat this: {}\n{}",
    "{} And again: {}",
    "Q: {}\nA:",
    "# {}\n",
    "- {}\n- {}\n-",
    '"{}", he said. "{}',
    "In short: {}",
    "{}\n\n{}\n\n",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, logprobs=2, ignore_eos=True)


OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}


def write_drafter(model: Path, folder: Path) -> None:
    """The first layers of the model, whose tokens are often right."""
    config = json.loads((model / "config.json").read_text())
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 20}))


@pytest.fixture(scope="module")
def plain(smollm2_dir: Path, prompts: list[list[int]], request: pytest.FixtureRequest) -> list[RequestOutput]:
    """Answers without drafts."""
    with LLM(str(smollm2_dir), **OPTIONS) as llm:
        tokenizer = llm.get_tokenizer()
        texts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
        asked = [form.format(text, text) for form in FORMS for text in texts]
        assert len(asked) == 200
        if not request.config.getoption("--all-prompts"):
            asked = asked[::11]  # of every form
        return llm.generate(asked, GREEDY, use_tqdm=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_tokens_are_those_without_drafts(
    method: str,
    smollm2_dir: Path,
    plain: list[RequestOutput],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation: dict[str, Any] = {"method": method}
    is_model = method == "draft_model"
    if is_model:
        write_drafter(smollm2_dir, tmp_path)
        speculation |= {"model": str(tmp_path), "num_speculative_tokens": 2}
        if not request.config.getoption("--all-prompts"):
            plain = plain[::4]
    asked = [one.prompt for one in plain]
    check_every_draft(monkeypatch)
    with LLM(str(smollm2_dir), speculative_config=speculation, **OPTIONS) as llm:
        drafted = llm.generate(asked, GREEDY, use_tqdm=False)
        stats = llm.engine.core.stats()
    if is_model:
        assert stats.spec_decode_num_draft_tokens > 60 * len(asked)
    assert stats.spec_decode_num_accepted_tokens > (1 if is_model else 5) * len(asked)
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
    assert ties <= min(4, -(-len(plain) // 5))
