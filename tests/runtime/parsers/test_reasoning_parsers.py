"""Every reasoning parser: reasoning and content, whatever the chunks; and both parsers together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.parsers.events import ParsedMessage
from compile_and_serve.runtime.parsers.output import OutputParser
from compile_and_serve.runtime.parsers.reasoning.base import ReasoningParser
from compile_and_serve.runtime.parsers.reasoning.granite import GraniteReasoningParser
from compile_and_serve.runtime.parsers.reasoning.harmony import HarmonyParser
from compile_and_serve.runtime.parsers.reasoning.hunyuan_a13b import HunyuanA13bParser
from compile_and_serve.runtime.parsers.reasoning.think import (
    THINK_PARSERS,
    DeepseekR1Parser,
    KimiK2Parser,
    MistralParser,
    Qwen3Parser,
    SeedOssParser,
)
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser

PARSERS = (*THINK_PARSERS, GraniteReasoningParser, HarmonyParser, HunyuanA13bParser)
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"

CASES: list[tuple[type[ReasoningParser], str, str, str, str]] = [
    (DeepseekR1Parser, "", "<think>\nA b\n</think>\n\nC d ", "A b", "C d "),
    (DeepseekR1Parser, "", "A b\n</think>\n\nC", "A b", "C"),
    (DeepseekR1Parser, "…<think>\n", "A b</think>C", "A b", "C"),
    (DeepseekR1Parser, "…</think>", "C <think>x</think>", "", "C <think>x</think>"),
    (DeepseekR1Parser, "", "never ends", "never ends", ""),
    (DeepseekR1Parser, "", "<think>\n\n</think>\n\n", "", ""),
    (Qwen3Parser, "", "<think>\nA\n</think>\n\nC", "A", "C"),
    (Qwen3Parser, "", " just <think> text\n", "", " just <think> text\n"),
    (Qwen3Parser, "<|im_start|>assistant\n<think>\n", "A</think>C", "A", "C"),
    (Qwen3Parser, "<think>\n\n</think>\n\n", "C", "", "C"),
    (Qwen3Parser, "", "<think>A", "A", ""),
    (Qwen3Parser, "", "<thin", "", "<thin"),
    (GraniteReasoningParser, "", "Here is my thought process: A\n\nHere is my response: C", "A", "C"),
    (GraniteReasoningParser, "", "Here's my thought process:\nA Here's my response:\nC", "A", "C"),
    (GraniteReasoningParser, "", "Here is Paris", "", "Here is Paris"),
    (HarmonyParser, "", f"{ANALYSIS}A<|end|><|start|>assistant{FINAL}C", "A", "C"),
    (HarmonyParser, "", f"{FINAL}C<|return|>", "", "C"),
    (HarmonyParser, "", f"{ANALYSIS}A", "A", ""),
    (HarmonyParser, "", f"{ANALYSIS}A<|end|><|start|>assistant<|chan", "A", ""),
    (HarmonyParser, "", "<|channel|>commentary<|message|>Soon.<|end|>", "", "Soon."),
    (HarmonyParser, "", "no head", "", "no head"),
    (SeedOssParser, "", "<seed:think>A</seed:think>\nC", "A", "C"),
    (SeedOssParser, "…<seed:think>", "A</seed:think>C", "A", "C"),
    (MistralParser, "", "[THINK]A[/THINK]C", "A", "C"),
    (MistralParser, "", "C [THINK", "", "C [THINK"),
    (KimiK2Parser, "", "A</think>C", "A", "C"),
    (KimiK2Parser, "", "A\n<|tool_calls_section_begin|>C", "A", "<|tool_calls_section_begin|>C"),
    (KimiK2Parser, "…<think></think>", "C", "", "C"),
    (HunyuanA13bParser, "", "<think>\nA\n</think>\n<answer>\nC d\n</answer>\n", "A", "C d"),
    (HunyuanA13bParser, "", "<think>\nA\n</think>\n<answer>\nC d\n", "A", "C d\n"),
    (HunyuanA13bParser, "", "<think>A</think><ans", "A", "<ans"),
    (HunyuanA13bParser, "…<think>\n\n</think>\n", "<answer>\nC d\n</answer>", "", "C d"),
    (HunyuanA13bParser, "", "<answer>\nC d\n</answer>", "", "C d"),
    (HunyuanA13bParser, "", "C d", "", "C d"),
    (HunyuanA13bParser, "", "<think>A</think>C </answer>", "A", "C </answer>"),
]


def parse(parser: type[ReasoningParser], prompt: str, chunks: list[str]) -> ParsedMessage:
    machine = parser(prompt)
    message = ParsedMessage()
    for chunk in chunks:
        message.add(machine.feed(chunk))
    return message.add(machine.finish())


@pytest.mark.parametrize(("parser", "prompt", "text", "reasoning", "content"), CASES)
def test_reasoning_and_content(parser: type[ReasoningParser], prompt: str, text: str, reasoning: str, content: str) -> None:
    for chunks in ([text], list(text)):
        message = parse(parser, prompt, chunks)
        assert (message.reasoning, message.content, message.calls) == (reasoning, content, [])


_PIECES = ["<think>", "</think>", "<seed:think>", "</seed:think>",
    "<answer>", "</answer>", "<|tool_calls_section_begin|>", "Here is my thought process:", "Here's my response:", *HarmonyParser.markers,
    "analysis", "commentary to=functions.f <|constrain|>json", '{"a": 1}', "{", "\n", " ", "x", "<", "H"]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["Harmony", "KimiK2", "MinimaxM2", "Mistral"])
@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=100, deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=12), data=st.data())
def test_chunks_do_not_matter(parser: type[ReasoningParser], pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = parse(parser, "", [text])
    assert parse(parser, "", chunks) == expected
    assert parse(parser, "", list(text)) == expected


def test_harmony_finds_calls() -> None:
    head = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    text = f'{ANALYSIS}A<|end|><|start|>assistant{head}{{"city": "Rome"}}<|call|>'
    message = parse(HarmonyParser, "", list(text))
    assert [(call.name, call.arguments) for call in message.calls] == [("get_weather", '{"city": "Rome"}')]
    assert (message.reasoning, message.content) == ("A", "")
    for bad in ("{city}", '{"city": ', "no JSON"):
        message = parse(HarmonyParser, "", [head + bad])
        assert (message.calls, message.content) == ([], bad)


def test_calls_after_reasoning_and_their_token_counts() -> None:
    tokens = ["<think>", "I ", "call", "</think>", "\n\n", '<tool_call>{"name": "f", ', '"arguments": {}}', "</tool_call>"]
    for pieces in ([(["".join(tokens)], range(8))], [([token], [i]) for i, token in enumerate(tokens)]):
        parser = OutputParser(Qwen3Parser(""), HermesParser({}), end_ids=[3], calls=True)
        message = ParsedMessage()
        for number, (texts, ids) in enumerate(pieces):
            message.add(parser.feed("".join(texts), list(ids), last=number == len(pieces) - 1))
        assert (message.reasoning, message.content, len(message.calls)) == ("I call", "", 1)
        assert parser.num_reasoning_tokens == 4


def test_calls_inside_reasoning_are_reasoning() -> None:
    parser = OutputParser(Qwen3Parser(""), HermesParser({}), calls=True)
    text = '<think><tool_call>{"name": "f"}</tool_call></think>C'
    message = ParsedMessage().add(parser.feed(text, [1], last=True))
    assert (message.content, message.calls) == ("C", [])
