"""`LLM` on a tiny model: results as in vLLM, sampling options, and errors before anything runs."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compile_and_serve import LLM, SamplingParams, StructuredOutputsParams
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.input_processor import PromptTooLongError
from compile_and_serve.runtime.tools.tool_use import ToolUseError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    options = {"max_num_seqs": 8, "max_model_len": 96, "num_kv_blocks": 64, "num_threads": 1}
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", enforce_eager=True, **options) as llm:
        yield llm


def test_output_has_vllms_shape(llm: LLM) -> None:
    [output] = llm.generate("Hello there", GREEDY, use_tqdm=False)
    assert output.prompt == "Hello there"
    assert output.prompt_token_ids == llm.get_tokenizer().encode("Hello there")
    [completion] = output.outputs
    assert completion.index == 0
    assert len(completion.token_ids) == 8
    assert completion.finish_reason == "length"
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert completion.logprobs is None
    assert output.finished


def test_prompts_in_every_form_keep_their_order(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("abc")
    alone = llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0]
    outputs = llm.generate(["xyz", {"prompt_token_ids": ids}, "abc"], [GREEDY] * 3, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["xyz", None, "abc"]
    assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids == alone.outputs[0].token_ids


def test_n_completions_with_a_seed_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate("abc", params, use_tqdm=False)[0] for _ in range(2))
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in second.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) == 3


def test_logprobs_are_dicts_with_the_chosen_token_first(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    [output] = llm.generate("abc", params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].rank == 1
        assert len(entry) == 3
        assert sorted((e.logprob for e in entry.values()), reverse=True) == [e.logprob for e in entry.values()]
        assert entry[token].decoded_token == llm.get_tokenizer().token_text(token)
    total = sum(e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_stop_string_ends_a_completion_and_its_request(llm: LLM) -> None:
    text = llm.generate("Hello there", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop = text[2:4]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=[stop])
    completion = llm.generate("Hello there", params, use_tqdm=False)[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    while llm.engine.has_work():
        llm.engine.step()


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    many = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert one[0].prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [o.outputs[0].token_ids for o in many] == [one[0].outputs[0].token_ids] * 2


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
    }
    for name in ("up", "down")
]


@pytest.mark.parametrize(
    ("choice", "names"), [("required", {"up", "down"}), ({"type": "function", "function": {"name": "down"}}, {"down"})]
)
def test_chat_forces_tool_calls(llm: LLM, choice: Any, names: set[str]) -> None:
    tokenizer = llm.get_tokenizer()
    spaces = {token: -100.0 for token in range(tokenizer.vocab_size) if not tokenizer.decode([token]).strip()}
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=None, logit_bias=spaces)
    messages = [{"role": "user", "content": "Go."}]
    template = "{% for m in messages %}{{ m.role }}\n{% endfor %}"  # a short prompt: the description is not in it
    tools, no_parallel = TOOLS, {"parallel_tool_calls": False, "use_tqdm": False, "chat_template": template}
    [result] = llm.chat(messages, params, tools=tools, tool_choice=choice, **no_parallel)
    for output in result.outputs:
        assert output.finish_reason == "stop"
        [call] = output.tool_calls
        assert call.name in names
        assert json.loads(call.arguments)["n"] in (1, 2)
        assert output.text.startswith("<tool_call>")


def test_chat_describes_tools_that_the_template_does_not_know(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(llm, "generate", lambda *given, **_: seen.append(given) or [SimpleNamespace(outputs=[])])
    messages = [{"role": "user", "content": "Go."}]
    for options in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        llm.chat(messages, GREEDY, **options)
    described, none, plain = (prompts[0]["prompt"] for prompts, _ in seen)
    assert "<tool_call>" in described
    assert '"name": "down"' in described
    assert none == plain
    assert [params[0].structured_outputs for _, params in seen] == [None] * 3  # free text may hold calls


def test_chat_refuses_wrong_tools(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Go."}]
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "nothing"}}}}}]
    structured = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    for options, message in (
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function must be"),
        ({"tools": ["up"]}, r"tools\[0\] must be an object like"),
        ({"tools": TOOLS, "tool_choice": ["up"]}, "tool_choice must be like"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "left"}}}, "names 'left'"),
        ({"tools": bad, "tool_choice": "required"}, r"^tools: .*\.a\.type\)"),
        ({"tools": TOOLS, "tool_choice": "required", "sampling_params": structured}, "cannot both"),
    ):
        with pytest.raises(ToolUseError, match=message):
            llm.chat(messages, use_tqdm=False, chat_template="{{ messages[0].role }}", **options)


def test_a_hostile_chat_template_has_a_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    monkeypatch.setattr(llm._template_pool(), "seconds", 1.0)
    with pytest.raises(ChatTemplateError, match="did not finish these messages within 1 seconds"):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=loop)
    monkeypatch.undo()
    assert llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs


def test_progress_bar_shows_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown


def test_a_wrong_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    for prompts, error in ((["a", ""], SamplingParamsError), (["a", "b " * 100], PromptTooLongError), ([5], ValueError)):
        with pytest.raises(error):
            llm.generate(prompts, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert not llm.engine.has_work()


def test_an_interrupt_leaves_no_request_in_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = llm.engine.step, []

    def interrupted() -> object:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    while llm.engine.has_work():
        llm.engine.step()
    assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


@pytest.fixture
def default_interrupt_handler() -> Iterator[None]:
    """The handler of an interactive process. A shell's background processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt_handler")
@pytest.mark.parametrize("times", [1, 2])
def test_the_first_interrupt_waits_for_the_end_of_a_step_and_the_second_does_not(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    options = {"max_num_seqs": 2, "max_model_len": 64, "num_kv_blocks": 16, "num_threads": 1, "enforce_eager": True}
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", **options) as llm:
        expected = llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        executor = llm.engine.core.executor
        launch, ended = executor.launch, []

        def interrupted(scheduled: object) -> object:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            ended.append(launch(scheduled))
            return ended[-1]

        monkeypatch.setattr(executor, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
        monkeypatch.undo()
        assert len(ended) == (times == 1)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if times == 1:
            assert llm.generate("a", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
        else:
            with pytest.raises(RuntimeError, match=r"An earlier step failed \(KeyboardInterrupt: \).*create a new engine"):
                llm.generate("a", GREEDY, use_tqdm=False)


def test_without_a_tokenizer_ids_go_in_and_out(tiny_llama_dir: Path) -> None:
    options = {"max_num_seqs": 2, "max_model_len": 64, "num_kv_blocks": 16, "num_threads": 1, "enforce_eager": True}
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", skip_tokenizer_init=True, **options) as llm:
        [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate("text", GREEDY, use_tqdm=False)


@pytest.mark.slow
def test_smollm2_answers_from_its_gguf_file(smollm2_gguf: Path) -> None:
    options = {"max_num_seqs": 2, "max_model_len": 256, "num_kv_blocks": 32, "enforce_eager": True}
    with LLM(str(smollm2_gguf), dtype="float32", device="cpu", **options) as llm:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        [output] = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
        assert "Paris" in output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"
        assert "<|im_end|>" not in output.outputs[0].text


def test_logprobs_of_the_whole_vocabulary_and_of_named_tokens(tiny_llama_dir: Path) -> None:
    options = {"max_num_seqs": 4, "max_model_len": 64, "num_kv_blocks": 64, "num_threads": 1, "max_logprobs": -1}
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    named = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, logprob_token_ids=[7, 9], ignore_eos=True)
    with LLM(str(tiny_llama_dir), dtype="float32", device="cpu", enforce_eager=True, **options) as llm:
        first, second = llm.generate(["abc", "abc"], [params, named], use_tqdm=False)
        vocab = llm.info.vocab_size
    whole, few = first.outputs[0], second.outputs[0]
    assert whole.token_ids == few.token_ids
    assert whole.logprobs is not None
    assert few.logprobs is not None
    assert first.prompt_logprobs is not None
    for entry in (*whole.logprobs, *first.prompt_logprobs[1:]):
        assert entry is not None
        assert len(entry) == vocab
        assert sum(math.exp(one.logprob) for one in entry.values()) == pytest.approx(1.0, abs=1e-4)
    for all_tokens, entry in zip(whole.logprobs, few.logprobs, strict=True):
        assert {7, 9} <= entry.keys()
        for token, one in entry.items():
            assert one.rank == all_tokens[token].rank
            assert one.logprob == pytest.approx(all_tokens[token].logprob, abs=1e-5)
