"""Requests and completions: checks, `n`, text, stop strings and aborts."""

from __future__ import annotations

import pytest

from compile_and_serve.runtime.messages import EngineInfo, RequestOutput, TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams, SamplingParamsError
from compile_and_serve.runtime.text.input_processor import InputProcessor, PromptTooLongError
from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput, OutputProcessor
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level_tokenizer

INFO = EngineInfo(max_model_len=64, vocab_size=258, num_kv_blocks=100, block_size=16, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer([])


@pytest.fixture
def inputs(tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(tokenizer, INFO)


class Run:
    """A processor with one request."""

    def __init__(self, inputs: InputProcessor, params: SamplingParams) -> None:
        self.inputs = inputs
        self.processor = OutputProcessor(inputs)
        prompt, params = inputs.prepare([5, 6], params)
        self.deltas: list[CompletionDelta] = []
        self.message = self.processor.add("r", prompt, params, self.deltas.append)
        self.requests = self.message.sequences()

    def feed(self, text: str, *, child: int = 0, **fields: object) -> list[str]:
        tokenizer = self.inputs.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(text)
        output = RequestOutput(request_id=self.requests[child].request_id, new_token_ids=ids, **fields)  # type: ignore[arg-type]
        return self.processor.process([output])

    def completion(self, index: int = 0) -> CompletionOutput:
        whole = CompletionOutput(index)
        for delta in self.deltas:
            if delta.index == index:
                whole.add(delta)
        return whole


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_deltas_extended_are_the_same_completion(inputs: InputProcessor, with_logprobs: bool) -> None:
    """Three deltas merged into one make the same completion."""
    run = Run(inputs, SamplingParams(stop=["END"]))
    for text, fields in (
        ("a🙂", {"num_cached_tokens": 1, "prompt_logprobs": [None, TokenLogprobs([6], [-2.0], 3)]}),
        ("bE", {}),
        ("ND of it", {}),
    ):
        ids = inputs.require_tokenizer("a test").encode(text)
        logprobs = [TokenLogprobs([token], [-0.1 * token], 1) for token in ids] if with_logprobs else None
        run.feed(text, new_logprobs=logprobs, **fields)
    expected = run.completion()
    assert (expected.text, expected.finish_reason, expected.stop_reason) == ("a🙂b", "stop", "END")
    first, *later = run.deltas
    assert len(later) == 2
    for delta in later:
        first.extend(delta)
    run.deltas = [first]
    assert run.completion() == expected


def test_log_probabilities_of_a_prompt_come_in_parts(inputs: InputProcessor) -> None:
    """The completion has them with its first token, and none if the prompt is never complete."""
    entries = [None, *(TokenLogprobs([token], [-0.5], 1) for token in range(4))]
    for last in (entries[4:], None):
        run = Run(inputs, SamplingParams(prompt_logprobs=0))
        for part in (entries[:2], entries[2:4], *([] if last else [entries[4:]])):
            run.feed("", prompt_logprobs=part)
        assert run.deltas == []
        run.feed("a", prompt_logprobs=last)
        run.feed("b")
        assert [delta.prompt_logprobs for delta in run.deltas] == [entries, None]
    run = Run(inputs, SamplingParams(prompt_logprobs=0))
    run.feed("", prompt_logprobs=entries[:2])
    run.feed("", finish_reason="error", error="It failed.")
    assert [(delta.prompt_logprobs, delta.error) for delta in run.deltas] == [(None, "It failed.")]


def test_each_completion_has_its_own_id_seed_and_index(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(n=3, seed=10))
    assert len({request.request_id for request in run.requests}) == 3
    assert [request.sampling_params.seed for request in run.requests] == [10, 11, 12]
    assert all(request.sampling_params.n == 1 for request in run.requests)
    assert run.message.request_ids == [request.request_id for request in run.requests]
    assert all(request.prompt_token_ids is run.message.prompt_token_ids for request in run.requests)
    run.feed("x", child=2, finish_reason="length")
    assert [delta.index for delta in run.deltas] == [2]
    assert len(run.processor) == 2


def test_engine_ids_differ_for_equal_request_ids(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams())
    again = run.processor.add("r", [5], SamplingParams(), run.deltas.append)
    assert again.request_id != run.requests[0].request_id


def test_stop_string_is_cut_and_reported_for_abort(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(stop=["END"]))
    assert run.feed("some E") == []
    assert run.completion().text == "some "
    assert run.feed("ND and more") == [run.requests[0].request_id]
    whole = run.completion()
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("some ", "stop", "END")
    assert len(whole.token_ids) == len("some END")  # none after the stop string
    assert len(run.processor) == 0


def test_stop_string_in_the_last_step_needs_no_abort(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(stop=["b"]))
    assert run.feed("ab", finish_reason="length") == []
    assert (run.completion().text, run.completion().finish_reason) == ("a", "stop")


def test_stop_token_is_in_the_ids_but_not_in_the_text(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(stop_token_ids=[7]))
    run.feed("ab!", finish_reason="stop", stop_reason=7)
    assert run.completion().text == "ab"
    assert len(run.completion().token_ids) == 3
    kept = Run(inputs, SamplingParams(stop_token_ids=[7], include_stop_str_in_output=True))
    kept.feed("ab!", finish_reason="stop", stop_reason=7)
    assert kept.completion().text == "ab!"


def test_held_text_is_released_at_the_end(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(stop=["END"]))
    run.feed("so EN", finish_reason="length")
    assert run.completion().text == "so EN"


def test_logprobs_end_with_the_tokens(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(stop=["b"], logprobs=0))
    entries = [TokenLogprobs([i], [-1.0], 1) for i in range(4)]
    run.feed("abcd", new_logprobs=entries)
    whole = run.completion()
    assert whole.logprobs is not None
    assert len(whole.logprobs) == len(whole.token_ids) == 2


def test_outputs_of_forgotten_requests_are_dropped(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(n=2))
    first, second = (request.request_id for request in run.requests)
    run.feed("a", child=1, finish_reason="length")
    assert run.processor.forget([first, second]) == [first]
    assert run.feed("x", child=0) == []
    assert [delta.index for delta in run.deltas] == [1]


def test_there_is_no_text_without_detokenization(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(detokenize=False))
    run.feed("abc", finish_reason="length")
    assert (run.completion().text, len(run.completion().token_ids)) == ("", 3)


def test_all_end_with_one_reason(inputs: InputProcessor) -> None:
    run = Run(inputs, SamplingParams(n=2))
    ended = run.processor.end_all("error", "The engine is gone.")
    assert ended == [request.request_id for request in run.requests]
    assert [(delta.finish_reason, delta.error) for delta in run.deltas] == [("error", "The engine is gone.")] * 2


def test_engine_request_carries_stop_and_end_ids(inputs: InputProcessor, tokenizer: Tokenizer) -> None:
    end = tokenizer.eos_token_ids
    request = inputs.engine_request("r", [5], SamplingParams(stop_token_ids=[9]))
    assert (request.stop_token_ids, request.eos_token_ids) == ([9, *end], end)
    ignoring = inputs.engine_request("r", [5], SamplingParams(stop_token_ids=[9], ignore_eos=True))
    assert ignoring.stop_token_ids == [9]


def test_max_tokens_defaults_to_the_remaining_room(inputs: InputProcessor) -> None:
    _, params = inputs.prepare([5] * 60, SamplingParams(max_tokens=None))
    assert params.max_tokens == 4
    _, params = inputs.prepare([5] * 64, SamplingParams(max_tokens=0))
    assert params.max_tokens == 0


@pytest.mark.parametrize("length,max_tokens", [(64, None), (65, 0), (60, 5), (64, 1)])
def test_the_error_of_a_long_prompt_names_all_lengths(inputs: InputProcessor, length: int, max_tokens: int | None) -> None:
    with pytest.raises(PromptTooLongError, match=f"64 tokens.*{length} tokens"):
        inputs.prepare([5] * length, SamplingParams(max_tokens=max_tokens))


def test_kv_cache_smaller_than_the_model_is_the_limit(tokenizer: Tokenizer) -> None:
    info = EngineInfo(max_model_len=64, vocab_size=258, num_kv_blocks=2, block_size=16, dtype="x", device="cpu")
    with pytest.raises(PromptTooLongError, match="KV cache holds 32 tokens"):
        InputProcessor(tokenizer, info).prepare([5] * 30, SamplingParams(max_tokens=8))


@pytest.mark.parametrize(
    "prompt,params,says",
    [
        ([], {}, "empty"),
        ([258], {}, "0 to 257"),
        ([-1], {}, "0 to 257"),
        ([5], {"stop_token_ids": [300]}, "300"),
        ([5], {"logit_bias": {3: float("nan")}}, "logit_bias"),
        ([5], {"temperature": -3.0}, "temperature"),
        ([5], {"stop": ["x"], "detokenize": False}, "detokenize"),
        ([5], {"truncate_prompt_tokens": 65}, "limit"),
        ([5], {"max_tokens": None, "min_tokens": 64}, "room for only 63"),
    ],
)
def test_wrong_requests_are_refused(inputs: InputProcessor, prompt: list[int], params: dict[str, object], says: str) -> None:
    with pytest.raises(SamplingParamsError, match=says):
        inputs.prepare(prompt, SamplingParams(**params))  # type: ignore[arg-type]


def test_bad_words_are_spelled_with_and_without_a_space() -> None:
    tokenizer = byte_level_tokenizer([" fox fox fox"] * 3, vocab_size=262)
    info = EngineInfo(max_model_len=64, vocab_size=262, num_kv_blocks=100, block_size=16, dtype="x", device="cpu")
    _, params = InputProcessor(tokenizer, info).prepare([5], SamplingParams(bad_words=["q"]))
    assert params.bad_words_token_ids == [tokenizer.encode("q")]
    _, params = InputProcessor(tokenizer, info).prepare([5], SamplingParams(bad_words=["fox"]))
    assert tokenizer.encode("fox") in params.bad_words_token_ids
    assert all(tokenizer.decode(ids).strip() == "fox" for ids in params.bad_words_token_ids)


@pytest.mark.parametrize(
    "words,says",
    [
        (["ab"] * 1025, "at most 1024 words, got 1025"),
        (["ab", "xy" * 300], "one has at least 600"),
        (["xy" * 1_000_000], "one has at least"),
        (["xy" * 50] * 170, "together, but they have at least 17000"),
    ],
)
def test_bad_words_beyond_the_limits_are_refused(words: list[str], says: str) -> None:
    tokenizer = byte_level_tokenizer([])
    info = EngineInfo(max_model_len=9999, vocab_size=300, num_kv_blocks=9999, block_size=16, dtype="x", device="cpu")
    with pytest.raises(SamplingParamsError, match=says) as error:
        InputProcessor(tokenizer, info).prepare([5], SamplingParams(bad_words=words))
    assert error.value.param == "bad_words"


def test_bad_words_longer_than_the_output_are_left_out() -> None:
    info = EngineInfo(max_model_len=99, vocab_size=300, num_kv_blocks=99, block_size=16, dtype="x", device="cpu")
    inputs = InputProcessor(byte_level_tokenizer([]), info)
    for max_tokens, lengths in ((None, {3, 98}), (98, {3, 98}), (97, {3}), (2, set())):
        params = SamplingParams(bad_words=["xyz", "x" * 98], max_tokens=max_tokens)
        _, prepared = inputs.prepare([5], params)
        assert {len(word) for word in prepared.bad_words_token_ids} == lengths


def test_without_a_tokenizer_text_is_refused() -> None:
    inputs = InputProcessor(None, INFO)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        inputs.encode("text")
    with pytest.raises(ValueError, match="stop strings"):
        inputs.prepare([5], SamplingParams(stop=["x"]))
