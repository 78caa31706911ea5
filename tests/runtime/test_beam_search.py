"""Beam search against an exhaustive reference on made-up distributions, and against transformers' own on a tiny model."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from compile_and_serve import LLM
from compile_and_serve.runtime.beam_search import BeamSearch, BeamSearchParams
from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParamsError

VOCAB, END = 4, 3


def logprobs_after(tokens: tuple[int, ...]) -> list[float]:
    """A distribution that depends on every token."""
    seed = sum((position + 1) * (token + 2) for position, token in enumerate(tokens))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(0).tolist()


def entry_after(tokens: tuple[int, ...]) -> TokenLogprobs:
    logprobs = logprobs_after(tokens)
    ids = sorted(range(VOCAB), key=lambda token: -logprobs[token])
    return TokenLogprobs([ids[0], *ids], [logprobs[ids[0]], *(logprobs[token] for token in ids)], 1)


def every_text(max_tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """Each sequence that ends with END or at the limit, with its log-probability."""
    texts = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            if END in tokens[:-1] or (length < max_tokens and tokens[-1] != END):
                continue
            texts.append((tokens, sum(logprobs_after(tokens[:i])[token] for i, token in enumerate(tokens))))
    return texts


@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_beams_as_wide_as_the_tree_find_the_best(length_penalty: float) -> None:
    max_tokens, width = 4, 64
    search = BeamSearch(width=width, max_tokens=max_tokens, end_ids=[END], length_penalty=length_penalty)
    steps = 0
    while search.alive:
        search.advance([entry_after(beam.token_ids) for beam in search.alive])
        steps += 1
    assert steps <= max_tokens
    scored = [(logprob / len(tokens) ** length_penalty, tokens) for tokens, logprob in every_text(max_tokens)]
    expected = sorted(scored, reverse=True)[:width]
    found = [(beam.score(length_penalty), beam.token_ids) for beam in search.results()]
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected])


def test_a_search_stops_when_nothing_can_improve() -> None:
    search = BeamSearch(width=1, max_tokens=1000, end_ids=[END], length_penalty=0.0)
    search.advance([TokenLogprobs([END, END, 0], [-0.1, -0.1, -5.0], 1)])
    assert not search.alive
    [beam] = search.results()
    assert (beam.token_ids, beam.ended, beam.logprob) == ((END,), True, -0.1)


def test_the_likeliest_continuations_of_all_beams_go_on() -> None:
    """As choosing among all of them says, ties in their order."""
    rng, width, vocab = random.Random(0), 24, 200
    search = BeamSearch(width=width, max_tokens=6, end_ids=[END, 77])
    while alive := search.alive:
        entries = []
        for _ in alive:
            ids = rng.sample(range(vocab), 2 * width)
            logprobs = sorted((rng.choice([-math.inf, *(-number / 4 for number in range(1, 20))]) for _ in ids), reverse=True)
            entries.append(TokenLogprobs([ids[0], *ids], [logprobs[0], *logprobs], 1))
        candidates = [
            (beam.logprob + logprob, (*beam.token_ids, token))
            for beam, entry in zip(alive, entries, strict=True)
            for token, logprob in zip(entry.ids[1:], entry.logprobs[1:], strict=True)
        ]
        going_on = [one for one in candidates if one[1][-1] not in (END, 77) and one[0] > -math.inf]
        expected = sorted(going_on, key=lambda one: -one[0])[:width]
        search.advance(entries)
        if search.alive:
            assert [(beam.logprob, beam.token_ids) for beam in search.alive] == expected
    assert len(search.results()) == width
    assert all((beam.token_ids[-1] in (END, 77)) == beam.ended for beam in search.results())


def test_width_out_of_range() -> None:
    for width in (0, 129):
        with pytest.raises(SamplingParamsError, match=r"in \[1, 128\]"):
            BeamSearch(width=width, max_tokens=1, end_ids=[])
    for penalty in (1e308, math.nan):
        with pytest.raises(SamplingParamsError, match="length_penalty"):
            BeamSearch(width=1, max_tokens=1, end_ids=[], length_penalty=penalty)


@pytest.mark.parametrize("width", [1, 3, 12])
def test_transformers_finds_the_same(width: int, tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompts = [[5, 6, 7], [100, 40, 3, 8, 21]]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    options = {"max_num_seqs": 16, "max_model_len": 64, "num_kv_blocks": 256, "num_threads": 1, "block_size": 4}
    params = BeamSearchParams(beam_width=width, max_tokens=6, ignore_eos=True)
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", enforce_eager=True, **options) as llm:
        outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
        text = llm.get_tokenizer().decode(outputs[0].sequences[0].tokens)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            theirs = model.generate(
                torch.tensor([prompt]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=6,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                length_penalty=1.0,
            )
        assert [sequence.tokens for sequence in output.sequences] == theirs.sequences.tolist()
        if width > 1:
            ours = [sequence.cum_logprob / 6 for sequence in output.sequences]
            assert ours == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
        assert all(s.finish_reason == "length" and not math.isnan(s.cum_logprob) for s in output.sequences)
    assert outputs[0].sequences[0].text == text
