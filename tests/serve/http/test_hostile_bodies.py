"""No body holds up the event loop or takes much memory, whatever is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from compile_and_serve.serve.http.json_body import (
    MAX_ELEMENTS,
    MAX_INTEGERS,
    MAX_TEXT,
    SMALL_BODY,
    BodyError,
    IncomingBody,
    decode_body,
    field_decoder,
)
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from tests.support.fake_server import FakeServer

MiB = 1 << 20
LIMIT = 4 * MiB
# The longest time for which the event loop may be blocked: 50 ms on an idle machine. Threads that wait for a core with the
# GIL are counted, too.
MAX_LAG = 0.25
MAX_MEMORY = 100.0  # MB

CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
RESPONSES = "/v1/responses"
MESSAGES = b'{"messages": [{"role": "user", "content": "Hi"}], '


def repeated(element: bytes, size: int = LIMIT - 200) -> bytes:
    """A JSON array of as many elements as `size` bytes hold."""
    return b"[" + element + (b"," + element) * ((size - len(element)) // (len(element) + 1)) + b"]"


def text(part: str, size: int = LIMIT - 200) -> bytes:
    raw = part.encode()
    return b'"' + raw * (size // len(raw)) + b'"'


def entries(value: bytes, size: int = LIMIT - 200) -> bytes:
    """A JSON object of as many entries as `size` bytes hold."""
    return b"{" + b",".join(b'"%d":%b' % (i, value) for i in range(size // (len(value) + 11))) + b"}"


# name → (path, function that makes the body); functions, so that the bodies are not all in memory at once
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "arguments of lists": (
        RESPONSES,
        lambda: (
            b'{"input":[{"type":"function_call","call_id":"1","name":"f","arguments":"['
            + b"[]," * (MiB - 100)
            + b'[]]"},{"role":"user","content":"x"}]}'
        ),
    ),
    "messages of integers": (CHAT, lambda: b'{"messages":' + repeated(b"0") + b"}"),
    "messages of large integers": (CHAT, lambda: b'{"messages":' + repeated(b"1234567") + b"}"),
    "messages of a million integers": (CHAT, lambda: b'{"messages":' + repeated(b"299", LIMIT - 64) + b"}"),
    "messages of objects": (CHAT, lambda: b'{"messages":' + repeated(b"{}") + b"}"),
    "messages of small objects": (CHAT, lambda: b'{"messages":' + repeated(b'{"a":0}') + b"}"),
    "messages of strings": (CHAT, lambda: b'{"messages":' + repeated(b'""') + b"}"),
    "messages of floats": (CHAT, lambda: b'{"messages":' + repeated(b"1.2345678901234567e-300") + b"}"),
    "messages of long integers": (CHAT, lambda: b'{"messages":' + repeated(b"9" * 4000) + b"}"),
    "messages": (CHAT, lambda: b'{"messages":' + repeated(b'{"role":"user","content":"x"}') + b"}"),
    "10000 messages": (CHAT, lambda: b'{"messages":' + repeated(b'{"role":"user","content":"' + b"x" * 370 + b'"}') + b"}"),
    "nested arrays": (CHAT, lambda: b'{"messages":' + b"[" * (LIMIT - 200) + b"}"),
    "nested objects": (CHAT, lambda: b'{"messages":' + b'{"a":' * (LIMIT // 5 - 200) + b"}"),
    "text": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + text("word ") + b"}]}"),
    "text of commas": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + text("[1,{:") + b"}]}"),
    "text of escapes": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + text('\\"') + b"}]}"),
    "text of backslashes": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + text("\\\\") + b"}]}"),
    "text of emoji": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + text("🙂") + b"}]}"),
    "text with one emoji": (CHAT, lambda: b'{"messages":[{"role":"user","content":"\xf0\x9f\x99\x82' + text("a")[1:] + b"}]}"),
    "text to truncate": (CHAT, lambda: b'{"truncate_prompt_tokens":-1,"messages":[{"role":"user","content":' + text("a") + b"}]}"),
    "text parts": (CHAT, lambda: b'{"messages":[{"role":"user","content":' + repeated(b'{"type":"text","text":""}') + b"}]}"),
    "stop": (CHAT, lambda: MESSAGES + b'"stop":' + repeated(b"0") + b"}"),
    "stop of strings": (CHAT, lambda: MESSAGES + b'"stop":' + repeated(b'"ab"') + b"}"),
    "stop of lists": (CHAT, lambda: MESSAGES + b'"stop":' + repeated(b"[]") + b"}"),
    "long stop": (CHAT, lambda: MESSAGES + b'"stop":' + text("ab") + b"}"),
    "allowed_token_ids": (CHAT, lambda: MESSAGES + b'"allowed_token_ids":' + repeated(b"5", 2 * MiB) + b"}"),
    "allowed_token_ids of strings": (CHAT, lambda: MESSAGES + b'"allowed_token_ids":' + repeated(b'"x"') + b"}"),
    "stop_token_ids": (CHAT, lambda: MESSAGES + b'"stop_token_ids":' + repeated(b"-1") + b"}"),
    "bad_words": (CHAT, lambda: MESSAGES + b'"bad_words":' + repeated(b"0") + b"}"),
    "bad_words of strings": (CHAT, lambda: MESSAGES + b'"bad_words":' + repeated(b'"ab"') + b"}"),
    "logit_bias": (CHAT, lambda: MESSAGES + b'"logit_bias":' + entries(b"1") + b"}"),
    "logit_bias of strings": (CHAT, lambda: MESSAGES + b'"logit_bias":' + entries(b'"x"') + b"}"),
    "logit_bias of 300 KiB": (CHAT, lambda: MESSAGES + b'"logit_bias":' + entries(b'"x"', 300 * 1024) + b"}"),
    "unknown fields": (CHAT, lambda: entries(b"0")),
    "unknown fields of 60 KiB": (CHAT, lambda: entries(b"0", 60 * 1024)),
    "floats of 60 KiB": (CHAT, lambda: b'{"messages":' + repeated(b"1.2345678901234567e-300", 60 * 1024) + b"}"),
    "an unknown field": (CHAT, lambda: MESSAGES + b'"x":' + repeated(b"0") + b"}"),
    "tools": (CHAT, lambda: MESSAGES + b'"tools":' + repeated(b"0") + b"}"),
    "chat_template_kwargs": (CHAT, lambda: MESSAGES + b'"chat_template_kwargs":' + entries(b"0") + b"}"),
    "prompt of ids": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b"5") + b"}"),
    "prompt of a million ids": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b"299", LIMIT - 64) + b"}"),
    "prompt of lists": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b"[5]") + b"}"),
    "prompt of texts": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b'"ab"') + b"}"),
    "prompt of 4096 texts": (COMPLETIONS, lambda: b'{"n":1,"prompt":' + repeated(b'"' + b"ab " * 340 + b'"') + b"}"),
    "prompt": (COMPLETIONS, lambda: b'{"prompt":' + text("a") + b"}"),
    "prompt of zeros": (COMPLETIONS, lambda: b'{"prompt":' + text("\\u0000") + b"}"),
    "a text to tokenize": (TOKENIZE, lambda: b'{"prompt":' + text("a ") + b"}"),
    "half a MiB to tokenize": (TOKENIZE, lambda: b'{"prompt":' + text("a", MiB // 2 - 2) + b"}"),
    "token strings": (TOKENIZE, lambda: b'{"return_token_strs":true,"prompt":' + text("z", MiB // 2 - 2) + b"}"),
    "messages to tokenize": (TOKENIZE, lambda: b'{"messages":' + repeated(b"0") + b"}"),
    "tokens": (DETOKENIZE, lambda: b'{"tokens":' + repeated(b"5") + b"}"),
    "131072 tokens": (DETOKENIZE, lambda: b'{"tokens":' + repeated(b"300", 4 * 131072) + b"}"),
    "tokens of strings": (DETOKENIZE, lambda: b'{"tokens":' + repeated(b'"x"') + b"}"),
    "spaces": (CHAT, lambda: b" " * (LIMIT - 1)),
    "32 MiB": (CHAT, lambda: b'{"messages":' + repeated(b"0", 32 * MiB) + b"}"),
}
# For a server that accepts 32 MiB.
LARGE = 32 * MiB - 200
LARGE_BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "integers": (CHAT, lambda: b'{"messages":' + repeated(b"0", LARGE) + b"}"),
    "floats": (CHAT, lambda: b'{"messages":' + repeated(b"1.25e-300", LARGE) + b"}"),
    "16 MiB of floats": (CHAT, lambda: b'{"messages":' + repeated(b"1.25e-300", 16 * MiB - 100) + b"}"),
    "long floats": (CHAT, lambda: b'{"messages":' + repeated(b"1." + b"3" * 4000, LARGE) + b"}"),
    "strings": (CHAT, lambda: b'{"messages":' + repeated(b'""', LARGE) + b"}"),
    "spaces": (CHAT, lambda: MESSAGES + b" " * LARGE),
    "text": (COMPLETIONS, lambda: b'{"prompt":' + text("word ", LARGE) + b"}"),
    "text of emoji": (COMPLETIONS, lambda: b'{"prompt":' + text("🙂", LARGE) + b"}"),
    "8 MiB of emoji": (COMPLETIONS, lambda: b'{"prompt":' + text("🙂", 8 * MiB - 200) + b"}"),
    "8 MiB with an emoji": (COMPLETIONS, lambda: b'{"prompt":"\xf0\x9f\x99\x82' + text("a", 8 * MiB - 200)[1:] + b"}"),
    "text of quotes": (COMPLETIONS, lambda: b'{"prompt":' + text('\\"', LARGE) + b"}"),
    "ids": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b"5", LARGE) + b"}"),
    "a million ids": (COMPLETIONS, lambda: b'{"prompt":' + repeated(b"           299", 15 * MiB) + b"}"),
    "brackets": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * LARGE + b"}"),
    "unknown field": (CHAT, lambda: MESSAGES + b'"x":' + repeated(b"0", LARGE) + b"}"),
}


def warm_up(server: FakeServer) -> None:
    """Let the server allocate what it needs once."""
    for padding in (0, 70_000):
        body = MESSAGES[:-2] + b"}" + b" " * padding
        response = httpx.post(server.url + CHAT, content=body, timeout=60)
        assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        warm_up(server)
        yield server


@pytest.fixture(scope="module")
def large_server() -> Iterator[FakeServer]:
    with FakeServer(max_body_bytes=32 * MiB) as server:
        warm_up(server)
        yield server


@pytest.mark.parametrize("name", BODIES)
def test_no_body_blocks_the_event_loop_or_takes_much_memory(server: FakeServer, name: str) -> None:
    check_cost(server, name, *BODIES[name])


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", LARGE_BODIES)
def test_no_body_of_32_mib_blocks_the_event_loop_or_takes_much_memory(large_server: FakeServer, name: str) -> None:
    check_cost(large_server, name, *LARGE_BODIES[name])


def check_cost(server: FakeServer, name: str, path: str, make_body: Callable[[], bytes]) -> None:
    body = make_body()
    server.start_measuring()
    response = httpx.post(server.url + path, content=body, timeout=120)
    lag, memory = server.measured()
    print(f"{name}: {response.status_code}, {lag * 1e3:.0f} ms, {memory:.0f} MB")
    assert response.status_code in (200, 400, 413), response.text[:300]
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.text) < 1500
    assert lag < MAX_LAG
    assert memory < MAX_MEMORY


def decode(body: bytes) -> Any:
    return decode_body(body, field_decoder(ChatCompletionRequest))


@pytest.mark.parametrize("padding", [0, 70_000], ids=["small", "large"])
def test_decoded_values(padding: int) -> None:
    body = (
        b'{"messages": [{"role": "user", "content": "a\\"[{,:\\\\"}, {"x": [1, -2.5e3, true, null, {}]}], "stop": "x",\n'
        b' "allowed_token_ids": [ 1,2 , 3], "stop_token_ids": [], "seed": -7, "top_p": 0.5, "logprobs": false,'
        b' "logit_bias": {"5": 1e1}, "unknown": [1]}' + b" " * padding
    )
    expected: dict[str, Any] = {
        "messages": [{"role": "user", "content": 'a"[{,:\\'}, {"x": [1, -2500.0, True, None, {}]}],
        "stop": "x",
        "allowed_token_ids": [1, 2, 3],
        "stop_token_ids": [],
        "seed": -7,
        "top_p": 0.5,
        "logprobs": False,
        "logit_bias": {"5": 10.0},
    }
    assert decode(body) == (expected if padding else expected | {"unknown": [1]})


@pytest.mark.parametrize(
    "field,status,message",
    [
        (b'"allowed_token_ids": ' + repeated(b"1", 2 * MAX_INTEGERS), None, ""),
        (b'"allowed_token_ids": ' + repeated(b"1", 2 * MAX_INTEGERS + 2), 413, "allowed_token_ids has more than 1048576"),
        (b'"messages": ' + repeated(b"{}", 3 * MAX_ELEMENTS // 2), None, ""),
        (b'"messages": ' + repeated(b"{}", 3 * MAX_ELEMENTS // 2 + 3), 413, "messages has more than 65536 elements"),
        (b'"messages": ["' + b"[{,:" * MAX_ELEMENTS + b'"]', None, ""),
        (b'"messages": ["' + b'\\"' * MAX_ELEMENTS * 3 + b'"]', None, ""),
        (b'"messages": ["' + b"\\\\" * MAX_ELEMENTS * 3 + b'"]', None, ""),
        (b'"stop": ' + repeated(b'"x"', 4 * MAX_ELEMENTS + 8), 413, "stop has more than 65536 elements"),
        (b'"messages": [1.' + b"0" * 70_000 + b"]", 400, "messages contains a number of more than 32 characters"),
        (b'"seed": ' + b"1" * 70_000, 400, "seed contains a number of more than 32 characters"),
    ],
)
def test_limits_of_a_large_body(field: bytes, status: int | None, message: str) -> None:
    body = b"{" + field + b"}" + b" " * 70_000
    if status is None:
        decode(body)
        return
    with pytest.raises(BodyError, match=message) as error:
        decode(body)
    assert error.value.status == status


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_strings_are_told_from_structure_wherever_a_body_is_cut(size: int) -> None:
    """The commas, brackets and escaped quotes of a string are text."""
    unit = b'"[1,{\\\\\\"", '  # one string
    filler = b" " * (SMALL_BODY + 1)
    body = IncomingBody()
    body.add(filler + b"[")
    units = unit * 3000
    for start in range(0, len(units), size):
        body.add(units[start : start + size])
    assert body.problem is None
    assert bytes(body.content) == filler + b"[" + units
    # The body still is outside of a string, so these brackets are counted.
    body.add(b"[" * (2 * MAX_INTEGERS))
    assert body.problem is not None
    assert body.problem.status == 413
    assert "elements" in str(body.problem)
    assert not body.content


@pytest.mark.parametrize(
    "part,message",
    [
        (b'"' + b"," * (MAX_TEXT + 1), "strings have more than 8388608 bytes"),
        (b" " * ((16 << 20) + 1), "more than 16777216 bytes outside"),
        (b'""' * (2 * MAX_ELEMENTS + 1), "more than 131072 strings"),
        (b"," * (2 * MAX_INTEGERS + 1), "more than 2097152 elements"),
    ],
)
def test_limits_of_an_incoming_body(part: bytes, message: str) -> None:
    body = IncomingBody()
    for start in range(0, len(part), 1 << 16):
        assert body.problem is None
        body.add(part[start : start + (1 << 16)])
    assert message in str(body.problem)


@pytest.mark.slow
async def test_a_refused_body_is_read_to_its_end(large_server: FakeServer) -> None:
    """A client that sends the whole body before it reads gets the answer, and may send more on the connection."""
    path, make_body = LARGE_BODIES["integers"]
    with httpx.Client(base_url=large_server.url, timeout=60) as client:
        response = client.post(path, content=make_body())
        assert response.status_code == 413
        assert "connection" not in response.headers
        assert client.get("/ping").status_code == 200
