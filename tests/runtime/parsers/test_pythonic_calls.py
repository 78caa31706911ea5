"""Pythonic calls as models write them, split at every place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compile_and_serve.runtime.parsers.events import ParsedMessage
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.lfm2 import Lfm2Parser
from compile_and_serve.runtime.parsers.tools.olmo3 import Olmo3Parser
from compile_and_serve.runtime.parsers.tools.pythonic import PythonicParser

HEREDOC = "cat > a.py << 'EOF'\nprint('hi', \"you\")\nif x:\n\tpass\nEOF"

ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    # Line breaks
    ("s='cat << EOF\nx\nEOF'", {"s": "cat << EOF\nx\nEOF"}),
    ('s="cat << EOF\nx\nEOF"', {"s": "cat << EOF\nx\nEOF"}),
    ("s='a\r\nb\r\n'", {"s": "a\r\nb\r\n"}),
    ("s='''a\n'b'\r\n'''", {"s": "a\n'b'\r\n"}),
    ("\n  s='a',\n  t='b',\n", {"s": "a", "t": "b"}),
    ("s='a \\\nb'", {"s": "a \\\nb"}),
    ("l=['a\nb', 'c'], d={'k\n': 'v\n'}", {"l": ["a\nb", "c"], "d": {"k\n": "v\n"}}),
    # Quotes that should have been escaped
    (f"s='{HEREDOC}'", {"s": HEREDOC}),
    (f's="{HEREDOC}"', {"s": HEREDOC}),
    ("s='sed -n '1,9p' f.py'", {"s": "sed -n '1,9p' f.py"}),
    ("s='it's', t=1", {"s": "it's", "t": 1}),
    ("s='print('x')', t='y'", {"s": "print('x')", "t": "y"}),
    ("s='echo 'a', 'b''", {"s": "echo 'a', 'b'"}),
    ("l=['a['x'] = 1', 'b'], d={'k': 'it's', 'z': 'y'}", {"l": ["a['x'] = 1", "b"], "d": {"k": "it's", "z": "y"}}),
    ('s="""say "hi""""', {"s": 'say "hi"'}),
    # What Python reads, too
    ("s='', t=\"\"", {"s": "", "t": ""}),
    ("s='it\\'s \\\"x\\\" \\n \\x41 \\u00e9 \\101 \\\\ \\q'", {"s": "it's \"x\" \n A é A \\ \\q"}),
    ("s=r'\\d+\\n'", {"s": "\\d+\\n"}),
    ("s=('a'\n   'b')", {"s": "ab"}),
    ("n=-1.5e3, i=+7, x=0x1f, k=1_000", {"n": -1500.0, "i": 7, "x": 31, "k": 1000}),
    ("t=(1, 2), u=(1,), v=(1), w=()", {"t": [1, 2], "u": [1], "v": 1, "w": []}),
    ("a=True, b=False, c=None", {"a": True, "b": False, "c": None}),
    ("d={1: 'a', 2: [], 'x': {}, None: 1}", {"d": {"1": "a", "2": [], "x": {}, "null": 1}}),
    # What Python refuses
    ("a=true, b=false, c=null", {"a": True, "b": False, "c": None}),
    ('s="\\ud83d\\ude00 \\/"', {"s": "😀 \\/"}),
    ("month=07, from='a', class=1, user-id=2", {"month": 7, "from": "a", "class": 1, "user-id": 2}),
    ("a=[1, 2,], b={'c': [{}, ], }, ", {"a": [1, 2], "b": {"c": [{}]}}),
    ("", {}),
]  # fmt: skip

MALFORMED = ["1", "'a'", "a=b", "a=1 b=2", "a=1, a=2", "a=1e999", "a=2j", "a=f(1)", "a=1 + 1", "a={1, 2}", "a={[]: 1}", "a=[1", "a='b",
    "a=b'x'", "a='\\U00ffffff'", "=1", ",", "*a", "a==1", "a=" + "[" * 100 + "]" * 100, "a=" + "9" * 5000]  # fmt: skip


def parse(parser: type[ToolParser], *chunks: str) -> ParsedMessage:
    machine = parser({"f": {}, "g": {}})
    message = ParsedMessage()
    for chunk in chunks:
        message.add(machine.feed(chunk))
    return message.add(machine.finish())


def parse_at_every_split(parser: type[ToolParser], text: str) -> ParsedMessage:
    whole = parse(parser, text)
    for at in range(1, len(text)):
        assert parse(parser, text[:at], text[at:]) == whole, (text[:at], text[at:])
    assert parse(parser, *text) == whole
    return whole


def calls_in(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@pytest.mark.parametrize(("source", "expected"), ARGUMENTS)
def test_arguments_in_every_format(source: str, expected: dict[str, Any]) -> None:
    for parser, text in (
        (PythonicParser, f"[f({source})]"),
        (PythonicParser, f"[f({source}), g(a='b')]"),
        (PythonicParser, f"<|python_start|>[g(a='b'), f({source})]<|python_end|>"),
        (Lfm2Parser, f"<|tool_call_start|>[f({source}), g(a='b')]<|tool_call_end|>"),
    ):
        message = parse_at_every_split(parser, text)
        assert sorted(calls_in(message)) == [("f", expected), ("g", {"a": "b"})][: len(message.calls)]
        assert message.content == ""


@pytest.mark.parametrize("source", MALFORMED)
def test_malformed_arguments_are_content(source: str) -> None:
    for text in (f"[f({source})]", f"<|python_start|>[f({source})]<|python_end|>"):
        message = parse(PythonicParser, text)
        assert (message.content, message.calls) == (text, [])
        assert parse(PythonicParser, *text) == message


def test_calls_before_a_malformed_one_stay() -> None:
    message = parse_at_every_split(PythonicParser, "[g(a=1), f(2)]")
    assert calls_in(message) == [("g", {"a": 1})]
    assert message.content == ", f(2)]"


def test_lines_of_olmo3() -> None:
    text = 'Let me see. <function_calls>f(a="x\\ny", b=null)\n\ng(c=[true, 1.5])</function_calls> Done.'
    message = parse_at_every_split(Olmo3Parser, text)
    assert calls_in(message) == [("f", {"a": "x\ny", "b": None}), ("g", {"c": [True, 1.5]})]
    assert message.content == "Let me see. Done."


def test_call_that_is_cut_off_ends_with_its_block() -> None:
    text = "<|tool_call_start|>[f(a='x)]<|tool_call_end|> Sorry: <|tool_call_start|>[f(a='x')]<|tool_call_end|>"
    message = parse_at_every_split(Lfm2Parser, text)
    assert calls_in(message) == [("f", {"a": "x"})]
    assert message.content == "<|tool_call_start|>[f(a='x)]<|tool_call_end|> Sorry:"
