"""Structured output through the engine, on a tiny model of random weights: whatever it would say, the output has the form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from compile_and_serve import LLM, SamplingParams, StructuredOutputsParams
from compile_and_serve.runtime.llm.llm import RequestOutput
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from compile_and_serve.runtime.structured.compiler import GrammarCompiler
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.masks import GrammarSequence, MaskedRows, TokenMasks
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "code": {"type": "string", "pattern": "^[0-9]{2}$"}, "on": {"type": "boolean"}},
    "required": ["kind", "code", "on"],
    "additionalProperties": False,
}
AS_JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "max_model_len": 256, "num_threads": 1}


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_dir), max_num_seqs=8, num_kv_blocks=256, **OPTIONS) as llm:
        yield llm


def generate(llm: LLM, *params: SamplingParams) -> list[RequestOutput]:
    prompts = [f"Prompt {index}" for index in range(len(params))]
    return llm.generate(prompts, params, use_tqdm=False)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"n": 4, "seed": 1}, {"ignore_eos": True, "seed": 3}])
def test_output_satisfies_its_schema_and_ends(llm: LLM, options: dict[str, Any]) -> None:
    [output] = generate(llm, SamplingParams(max_tokens=100, structured_outputs=AS_JSON, **options))
    for completion in output.outputs:
        assert completion.finish_reason == "stop"
        assert completion.stop_reason is None
        check(completion.text)


def test_items_are_distinct_where_the_schema_says_so(llm: LLM) -> None:
    items = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 3}
    form = StructuredOutputsParams(json={**items, "uniqueItems": True}, disable_any_whitespace=True)
    free = StructuredOutputsParams(json={**items, "maxItems": 3}, disable_any_whitespace=True)
    params = [SamplingParams(seed=5, n=6, max_tokens=60, structured_outputs=one) for one in (form, free)]
    distinct, repeated = ([len(set(json.loads(c.text))) for c in output.outputs] for output in generate(llm, *params))
    assert distinct == [3] * 6
    assert min(repeated) < 3


def test_free_and_structured_requests_share_steps(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tag = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "[ab]"}, "end": ">"}
    forms = [
        StructuredOutputsParams(regex="[0-9]{3}-[0-9]{2}"),
        StructuredOutputsParams(choice=["yes", "no"]),
        AS_JSON,
        StructuredOutputsParams(grammar='root ::= "x" | "y" root'),
        StructuredOutputsParams(structural_tag={"format": tag}),
    ]
    mixed = [SamplingParams(temperature=1.0, seed=2, max_tokens=60, structured_outputs=form) for form in forms]
    alone = texts(generate(llm, free))
    free_text, number, choice, as_json, letters, tagged = texts(generate(llm, free, *mixed))
    assert free_text == alone[0]
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", number)
    assert choice in ("yes", "no")
    check(as_json)
    assert re.fullmatch("y*x?", letters)
    assert re.fullmatch("<[ab]>", tagged)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    [output] = generate(
        llm, SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, structured_outputs=StructuredOutputsParams(regex="[0-9]{9}"))
    )
    [completion] = output.outputs
    assert completion.logprobs is not None
    entries = [entry[token] for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert all(np.isfinite(entry.logprob) for entry in entries)
    assert any(entry.rank > 1 for entry in entries)  # the model would have said something else


def test_penalties_bias_and_stop_strings_apply_to_what_the_grammar_leaves(llm: LLM) -> None:
    token = llm.get_tokenizer().encode("7", add_special_tokens=False)[0]
    digits = StructuredOutputsParams(regex="[0-9]+")
    [output] = generate(llm, SamplingParams(temperature=0.0, max_tokens=6, logit_bias={token: 90.0}, structured_outputs=digits))
    assert set(output.outputs[0].text) == {"7"}
    stopped = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={token: 90.0}, stop=["777"], structured_outputs=digits)
    assert generate(llm, stopped)[0].outputs[0].stop_reason == "777"
    [output] = generate(llm, SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=2.0, structured_outputs=digits))
    assert set(output.outputs[0].text) <= set("0123456789")
    with pytest.raises(RuntimeError, match="exclude every one"):
        generate(llm, SamplingParams(max_tokens=4, allowed_token_ids=[llm.get_tokenizer().encode("x")[-1]], structured_outputs=digits))


def test_min_tokens_holds_as_long_as_something_else_may_follow(llm: LLM) -> None:
    eos = llm.get_tokenizer().eos_token_ids[0]
    ends = {"logit_bias": {eos: 90.0}, "temperature": 0.0, "max_tokens": 30}
    loose = StructuredOutputsParams(regex="[0-9]{2,}")
    assert len(generate(llm, SamplingParams(structured_outputs=loose, **ends))[0].outputs[0].text) == 2
    [output] = generate(llm, SamplingParams(structured_outputs=loose, min_tokens=9, **ends))
    assert len(output.outputs[0].token_ids) == 10
    [output] = generate(llm, SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]{2}"), min_tokens=9, **ends))
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].text) == 2


def test_structure_begins_after_a_marker(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    [free] = generate(llm, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    tokens = free.outputs[0].token_ids
    marker = tokens[3:5]
    form = StructuredOutputsParams(regex="[0-9]{3}", begins_after=[[tokenizer.eos_token_ids[0]], marker])
    [output] = generate(llm, SamplingParams(temperature=0.0, max_tokens=30, structured_outputs=form))
    got = output.outputs[0].token_ids
    first = next(end for end in range(2, len(got)) if got[end - 2 : end] == marker)
    assert got[:first] == tokens[:first]
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(got[first:], skip_special_tokens=True))


def test_wrong_forms_raise_before_anything_runs(llm: LLM) -> None:
    for form, says in (
        (StructuredOutputsParams(json={"properties": {"a": {"type": "foo"}}}), r"\(at \$\.properties\.a\.type\)"),
        (StructuredOutputsParams(), "Exactly one"),
        (StructuredOutputsParams(regex="a", begins_after=[[]]), "begins_after"),
    ):
        with pytest.raises(SamplingParamsError, match=says) as caught:
            generate(llm, SamplingParams(structured_outputs=form))
        assert caught.value.param == "structured_outputs"


RUNS: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True},
    "preemptions": {"num_kv_blocks": 18, "max_model_len": 128},
    "chunks": {"block_size": 4, "num_kv_blocks": 512, "max_num_batched_tokens": 8, "max_num_seqs": 4},
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_tokens_do_not_depend_on_how_the_request_runs(llm: LLM, tiny_llama_dir: Path, options: dict[str, Any]) -> None:
    form = StructuredOutputsParams(regex="([0-9a-f]{2} ){20}", begins_after=[])
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=90, structured_outputs=form) for seed in range(6)]
    params.append(SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True))
    expected = texts(generate(llm, *params))
    with LLM(str(tiny_llama_dir), **(OPTIONS | {"num_kv_blocks": 256, "max_num_seqs": 8} | options)) as other:
        assert texts(generate(other, *params)) == expected
        preemptions = other.engine.core.stats().num_preemptions  # type: ignore[union-attr]
    assert bool(preemptions) == ("max_model_len" in options)
    assert all(re.fullmatch("([0-9a-f]{2} ){20}", text) for text in expected[:-1])


def test_a_grammar_that_compiles_long_delays_nobody_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from compile_and_serve.runtime.engine.core import EngineCore

    core = llm.engine.core
    assert isinstance(core, EngineCore)
    grammar: Future[Any] = Future()
    ready = core.executor.compile_grammar(to_grammar(AS_JSON, {})).result()
    inputs = llm._inputs

    def submit(request_id: str, params: SamplingParams) -> None:
        prompt, prepared = inputs.prepare(llm.get_tokenizer().encode("Hi"), params)
        core.add_request(inputs.engine_request(request_id, prompt, prepared))

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "compile_grammar", lambda text, tenant: grammar)
        submit("slow", SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=AS_JSON))
    submit("free", SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    seen = [output for _ in range(12) for output in core.step().outputs]
    assert {output.request_id for output in seen} == {"free"}
    assert seen[-1].finish_reason == "length"
    assert core.has_work()
    grammar.set_result(ready)
    while core.has_work():
        seen += core.step().outputs
    tokens = [token for output in seen if output.request_id == "slow" for token in output.new_token_ids]
    check(llm.get_tokenizer().decode(tokens))

    wrong: Future[Any] = Future()
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "compile_grammar", lambda text, tenant: wrong)
        submit("wrong", SamplingParams(structured_outputs=AS_JSON))
    wrong.set_exception(ValueError("It is wrong."))
    [output] = core.step().outputs
    assert (output.request_id, output.finish_reason, output.error, output.error_kind) == ("wrong", "error", "It is wrong.", "invalid")
    assert not core.has_work()


def test_masks_that_exceed_the_limits_end_their_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: TokenMasks, batch: list[MaskedRows], *, is_timed: bool) -> int:
        count = fill(self, batch, is_timed=is_timed)
        for rows in batch:
            if rows.sequence.num_tokens == 3 and rows.sequence.min_tokens == 1:
                rows.sequence.error = "The structured output's grammar could not be followed: too complex."
        return count

    fill = TokenMasks.fill
    monkeypatch.setattr(TokenMasks, "fill", failing)
    good = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=AS_JSON)
    bad = SamplingParams(temperature=0.0, max_tokens=60, min_tokens=1, structured_outputs=AS_JSON)
    with pytest.raises(RuntimeError, match="could not be followed: too complex"):
        generate(llm, good, bad)
    check(texts(generate(llm, good))[0])


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_llama_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize("form", [{}, {"regex": "[0-9]{3}"}])
def test_thinking_ends_at_its_budget(llm: LLM, form: dict[str, Any]) -> None:
    tokenizer = llm.get_tokenizer()
    marker = tokenizer.encode(" end of it", add_special_tokens=False)
    assert len(marker) > 1
    budget = StructuredOutputsParams(begins_after=[marker], thinking_token_budget=5, **form)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, structured_outputs=budget)
    plain = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [limited], [free] = ([output.outputs[0] for output in generate(llm, one)] for one in (params, plain))
    assert list(limited.token_ids[:5]) == list(free.token_ids[:5])
    assert list(limited.token_ids[5 : 5 + len(marker)]) == marker
    rest = list(limited.token_ids[5 + len(marker) :])
    if form:
        assert re.fullmatch("[0-9]{3}", tokenizer.decode(rest).strip())
    else:
        assert len(limited.token_ids) == 40


class TestMasks:
    """Masks of several rows a sequence, as guessed tokens need them."""

    def sequence(self, compiler: GrammarCompiler, form: StructuredOutputsParams, **options: Any) -> GrammarSequence:
        fields = {"begins_after": [], "min_tokens": 0, "stop_ids": []} | options
        return GrammarSequence(compiler.compile(to_grammar(form, {})).result(), **fields)

    def test_each_row_of_guessed_tokens_has_its_mask(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        [a, b, c] = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
        sequence = self.sequence(compiler, StructuredOutputsParams(regex="[ab][c][ab]"))
        other = self.sequence(compiler, StructuredOutputsParams(regex="[c]"))
        masks = TokenMasks(8, compiler.num_words, torch.device("cpu"), 1)
        rows = [MaskedRows(first_row=0, sequence=other, drafts=[]), MaskedRows(first_row=1, sequence=sequence, drafts=[a, b])]
        for _ in range(2):  # the sequence has not moved on
            logits = torch.zeros(4, tokenizer.vocab_size)
            count = masks.fill(rows)
            masks.apply(logits, count)
            allowed = [set(torch.isfinite(row).nonzero().flatten().tolist()) & {a, b, c} for row in logits]
            assert allowed[:3] == [{c}, {a, b}, {c}]  # the second guess is wrong, so that the row behind it does not matter
        sequence.advance([a, c])
        logits = torch.zeros(1, tokenizer.vocab_size)
        masks.apply(logits, masks.fill([MaskedRows(first_row=0, sequence=sequence, drafts=[])]))
        assert set(torch.isfinite(logits[0]).nonzero().flatten().tolist()) & {a, b, c} == {a, b}

    def test_thinking_counts_from_its_start(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        start, end = [7, 8], [9, 10, 9]
        options = {"begins_after": [end], "thinking_starts": start, "thinking_token_budget": 2, "is_free": True}
        sequence = self.sequence(compiler, StructuredOutputsParams(regex="a"), **options)
        expected = {5: None, 7: None, 8: None, 6: None, 11: 9, 9: 10, 10: 9}
        for token, forced in expected.items():
            sequence.advance([token])
            assert sequence.forced_token == forced
            assert sequence.is_masked == (forced is not None)
        sequence.advance([9])
        assert sequence.preamble is None
        assert not sequence.is_masked
        never = self.sequence(compiler, StructuredOutputsParams(regex="a"), **options)
        never.advance([1] * 50)
        assert never.forced_token is None

    def test_the_structure_begins_at_once_without_a_start(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        [a, b, c] = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc")
        [eos] = tokenizer.eos_token_ids
        masks = TokenMasks(8, compiler.num_words, torch.device("cpu"), 1)

        def allowed(sequence: GrammarSequence, *drafts: int) -> list[set[int]]:
            logits = torch.zeros(1 + len(drafts), tokenizer.vocab_size)
            count = masks.fill([MaskedRows(first_row=0, sequence=sequence, drafts=list(drafts))])
            masks.apply(logits, count)
            return [set(torch.isfinite(row).nonzero().flatten().tolist()) & {a, b, c, eos} for row in logits]

        options = {"begins_after": [[b]], "thinking_starts": [c, c], "stop_ids": [eos]}
        form = StructuredOutputsParams(regex="(a|ca)b")
        sequence = self.sequence(compiler, form, **options)
        assert allowed(sequence) == [{a, c}]
        assert allowed(sequence, a) == [{a, c}, {b}]
        # Neither the end of the free text nor the grammar may be skipped by guessed tokens.
        assert allowed(sequence, c, c, a, b, c) == [{a, c}, {c}, {a, b, c}, {a, b, c}, {a, c}, {a}]
        sequence.advance([c])
        assert allowed(sequence) == [{a, c}]
        sequence.advance([a])
        assert allowed(sequence) == [{b}]
        sequence.advance([b, eos])
        assert (sequence.has_ended, sequence.error) == (True, None)
        thinking = self.sequence(compiler, form, **options)
        thinking.advance([c, c, a])
        assert allowed(thinking) == [{a, b, c}]  # no end
        thinking.advance([b])
        assert allowed(thinking) == [{a, c}]
        ended = self.sequence(compiler, form, **options, may_end_before=True)
        ended.advance([c, c])
        assert allowed(ended) == [{a, b, c, eos}]

    def test_tokens_after_the_end_are_ignored(self, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
        eos = tokenizer.eos_token_ids[0]
        [a] = tokenizer.encode("a", add_special_tokens=False)
        sequence = self.sequence(compiler, StructuredOutputsParams(regex="a"), stop_ids=[eos])
        sequence.advance([a, eos, a, a])
        assert sequence.has_ended
        assert sequence.error is None
        assert TokenMasks(1, compiler.num_words, torch.device("cpu"), 1).fill([MaskedRows(first_row=0, sequence=sequence, drafts=[])]) == 0
