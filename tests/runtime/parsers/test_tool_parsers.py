"""Every tool parser: calls are found whole, whatever the chunks; what is malformed is content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_and_serve.runtime.parsers.events import CallArguments, CallBegin, CallDropped, Content, Event, ParsedMessage
from compile_and_serve.runtime.parsers.tools.base import ToolParser
from compile_and_serve.runtime.parsers.tools.hermes import HermesParser
from tests.runtime.parsers.formats import FORMATS, SCHEMAS, Calls, Format

formats = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())

TWO: Calls = [
    ("get_weather", {"city": 'Zürich "old"\n\ttown </tool', "days": 3, "wind": True, "heights": [1.5, -2], "options": {"a": {"b": []}}}),
    ("now", {}),
]


def events_of(parser: type[ToolParser], chunks: Sequence[str]) -> list[Event]:
    machine = parser(SCHEMAS)
    events = [event for chunk in chunks for event in machine.feed(chunk)]
    return events + machine.finish()


def parse(parser: type[ToolParser], chunks: Sequence[str]) -> ParsedMessage:
    return ParsedMessage().add(events_of(parser, chunks))


def calls_in(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


@formats
def test_calls_are_found(format: Format) -> None:
    for before in ("", "Let me see.\n\n") if format.before else ("",):
        message = parse(format.parser, [before + format.write(TWO) + "\n"])
        assert calls_in(message) == list(TWO)
        assert message.content == before.rstrip()


@formats
def test_every_split_and_every_cut(format: Format) -> None:
    """The calls do not depend on where the text is split, and a text that ends early has those that are complete."""
    text = "Let me see.\n\n" * format.before + format.write(TWO)
    whole = parse(format.parser, [text])
    for at in range(len(text)):
        assert parse(format.parser, [text[:at], text[at:]]) == whole, at
        cut = parse(format.parser, [text[:at]])
        assert calls_in(cut) == list(TWO[: len(cut.calls)]), at
        if not cut.calls:
            assert cut.content == text[:at], at


@formats
def test_text_after_the_calls_is_content(format: Format) -> None:
    if format.before:
        message = parse(format.parser, [format.write(TWO) + "\n\nDone <b> [1] {2}.\n"])
        assert calls_in(message) == list(TWO)
        assert message.content.strip() == "Done <b> [1] {2}."


@formats
def test_unknown_tools_are_called_only_after_a_marker(format: Format) -> None:
    text = format.write([("unknown", {"city": "Rome"})])
    message = parse(format.parser, [text])
    if text.startswith(("[{", "{", "[unknown", "```")):
        assert (message.content, message.calls) == (text, [])
    else:
        assert (message.content, calls_in(message)) == ("", [("unknown", {"city": "Rome"})])


NO_CALLS = ("", "  \n", "Hello [x](y) {1} <b> \n", "<", "{", "[", " <tool", "[TOOL_CAL", '{"a": 1}', "functools", "<function")


@formats
def test_text_without_a_whole_call_is_unchanged(format: Format) -> None:
    for text in (*NO_CALLS, *format.malformed):
        message = parse(format.parser, [text])
        assert (message.content, message.calls) == (text, []), text


@formats
def test_call_after_a_malformed_one_is_found(format: Format) -> None:
    if not format.before:
        return
    for text in format.malformed[1:]:
        if "```<" in text or not text.strip() or "\n\n" in text:
            continue
        message = parse(format.parser, [text + "\n. " + format.write(TWO[1:])])
        assert calls_in(message)[-1] == ("now", {}), text


def _merged(events: Sequence[Event]) -> list[Any]:
    """Names and whole arguments of the calls that a stream shows."""
    shown: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            shown.append([event.name, ""])
        elif isinstance(event, CallArguments):
            shown[-1][1] += event.text
    return shown


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=12), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["llama3_json", "qwen3_coder", "deepseek_v3", "pythonic", "glm45", "kimi_k2", "minimax_m2", "xlam"])
@formats
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_chunks_do_not_matter(format: Format, data: st.DataObject) -> None:
    source = data.draw(st.sampled_from(["calls", "malformed", "mixture"]))
    city = data.draw(st.text(max_size=20).map(lambda text: text.replace("\r", "")))
    options = data.draw(st.dictionaries(st.text("abc", min_size=1, max_size=3), _VALUES, max_size=3))
    whole = format.write([("get_weather", {"city": city, "options": options}), ("now", {})])
    if source == "malformed" and format.malformed:
        whole = data.draw(st.sampled_from(format.malformed))
    elif source == "mixture":
        cut = data.draw(st.integers(0, len(whole)))
        whole = whole[:cut] + data.draw(st.text(' \n{}[]<>",:;()ab', max_size=6)) + data.draw(st.sampled_from(["", whole[cut:], whole]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    expected = parse(format.parser, [whole])
    assert parse(format.parser, chunks) == expected
    assert parse(format.parser, list(whole)) == expected
    for call in expected.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if source == "calls":
        assert _merged(events_of(format.parser, chunks)) == [[call.name, call.arguments] for call in expected.calls]


@formats
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text('{}[]<>|/"=:,()tool_callfunctions \n', max_size=80))
def test_no_text_raises_and_none_is_lost(format: Format, text: str) -> None:
    message = parse(format.parser, [text])
    if not message.calls:
        assert message.content == text
    message.content.encode()


def test_arguments_stream_while_they_are_generated() -> None:
    for name in ("hermes", "mistral", "mistral, named", "granite", "phi4", "deepseek_v3", "qwen3_coder", "llama3_json", "glm45", "kimi_k2",
        "minimax_m2", "hunyuan_a13b", "seed_oss", "step3", "internlm", "xlam"):  # fmt: skip
        format = FORMATS[name]
        text = format.write([("get_weather", {"city": "a long name of a city"})])
        events = events_of(format.parser, list(text))
        assert sum(isinstance(event, CallArguments) for event in events) > 10, name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"arguments": {"a": 1}, "name": "now"}', {"a": 1}),
        ('{"name": "now"}', {}),
        ('{"name": "now", "arguments": null}', {}),
        ('{"name": "now", "arguments": ""}', {}),
        ('{"name": "now", "arguments": "{\\"a\\": [1]}"}', {"a": [1]}),
        ('{"type": "function", "id": [{"x": 1}, 5], "name": "now", "parameters": {"a": "b"}, "z": 1}', {"a": "b"}),
        ('{"name": "now", "arguments": {"a": "line\nline"}}', {"a": "line\nline"}),
        (f'{{"name": "now", "arguments": {{"a": {10**4200}}}}}', {"a": 10**4200}),
    ],
)
def test_variants_of_a_call(text: str, expected: dict[str, Any]) -> None:
    assert calls_in(parse(FORMATS["hermes"].parser, [f"<tool_call>{text}</tool_call>"])) == [("now", expected)]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("days", "3", 3),
        ("days", "many", "many"),
        ("wind", "True", True),
        ("options", "{'a': 1}", {"a": 1}),
        ("note", "null", None),
        ("note", "12", "12"),
        ("unknown", "12", "12"),
        ("city", "12", "12"),
        ("city", "", ""),
        ("heights", "[1e999]", "[1e999]"),
    ],
)
def test_qwen3_coder_uses_the_schemas_types(key: str, value: str, expected: Any) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert calls_in(parse(FORMATS["qwen3_coder"].parser, [text])) == [("get_weather", {key: expected})]


@pytest.mark.parametrize("name", ["glm45", "glm45, 4.7", "minimax_m2", "seed_oss", "step3"])
def test_xml_values_have_the_schemas_types(name: str) -> None:
    arguments = {"days": 3, "wind": False, "heights": [1.5], "options": {"a": None}, "note": None, "city": "[1]", "other": "true"}
    format = FORMATS[name]
    assert calls_in(parse(format.parser, [format.write([("get_weather", arguments)])])) == [("get_weather", arguments)]


def test_qwen3_coder_without_a_parameters_end_tag() -> None:
    text = "<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n2\n</function>"
    assert calls_in(parse(FORMATS["qwen3_coder"].parser, [text])) == [("get_weather", {"city": "Rome", "days": 2})]


@formats
def test_grammars_write_what_the_parser_reads(format: Format) -> None:
    parser = format.parser
    texts = parser.call_format("get_weather")
    if texts is None:
        return
    call = texts[0] + '{"city": "Rome"}' + texts[1]
    for count in (1, 2):
        written = parser.separator.join([call] * count)
        if parser.list_opener:
            written = parser.list_opener + written + parser.list_closer
        message = parse(parser, [written])
        assert calls_in(message) == [("get_weather", {"city": "Rome"})] * count
        assert message.content == ""


@formats
def test_a_beginning_call_of_a_cut_output_is_no_content(format: Format) -> None:
    """Whatever max_tokens leaves of a call: until its name is known, nothing of it is shown."""
    written = format.write([("get_weather", {"city": "Paris"})])
    openers = [opener for opener in format.parser.openers if written.startswith(opener) and not opener.startswith("```")]
    lead = "Hello " if format.before else ""
    for length in range(1, len(written)):
        for size in (1, length):
            machine = format.parser(SCHEMAS)
            text = lead + written[:length]
            events = [event for at in range(0, len(text), size) for event in machine.feed(text[at : at + size])]
            machine.was_cut = True
            events += machine.finish()
            if openers:
                dropped = [event.text for event in events if isinstance(event, CallDropped) and not event.begun]
                shown = "".join([*(event.text for event in events if isinstance(event, Content)), *dropped])
                assert shown.strip() == lead.strip(), (written[:length], events)


def test_an_output_that_ends_by_itself_shows_what_it_ends_with() -> None:
    for text in ("a <", "a <tool_call", "a <tool_call>{"):
        machine = HermesParser(SCHEMAS)
        assert ParsedMessage().add([*machine.feed(text), *machine.finish()]).content == text
    cut = HermesParser(SCHEMAS)
    cut.was_cut = True
    assert ParsedMessage().add([*cut.feed("a < b"), *cut.finish()]).content == "a < b"
