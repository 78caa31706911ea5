"""Decodes JSON request bodies with bounded time and memory.

Decoding holds the GIL, also in a thread, so that a body of millions of elements would stop the event loop. A large body is
therefore measured while it arrives. Then it is split into its fields, without decoding them, and each field's elements are
counted before it is decoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from compile_and_serve.serve.errors import describe_validation
from compile_and_serve.serve.protocol.fields import RequestModel
from compile_and_serve.serve.tenants.current import note_user
from compile_and_serve.serve.tenants.turns import FairTurns

SMALL_BODY = 64 * 1024  # bytes; smaller bodies hold few elements and are decoded at once
MAX_ELEMENTS = 1 << 16  # JSON values in a field of a large body, except in lists of integers
MAX_INTEGERS = 1 << 20  # integers in a field
MAX_BODY_ELEMENTS = 2 * MAX_INTEGERS  # JSON values in a large body
MAX_BODY_STRINGS = 2 * MAX_ELEMENTS  # strings in a large body
MAX_TEXT = 8 << 20  # bytes of all strings of a body; as text they take up to four times as much
MAX_STRUCTURE = 16 << 20  # bytes of a body outside of its strings
_MAX_NUMBER = 32  # characters of a number

# Of large bodies. One thread: each holds the GIL for tens of milliseconds at a time, and the event loop would wait for all of them.
_DECODING = ThreadPoolExecutor(1, thread_name_prefix="bodies")
_DECODING_TURNS = FairTurns(1)

_WHITESPACE = b" \t\r\n"
_INTEGER_LIST_BYTES = b"0123456789-,[]" + _WHITESPACE
_LONG_NUMBER = re.compile(rb"[0-9][0-9.eE+-]{%d}" % _MAX_NUMBER)
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))

_Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
# msgspec's own conversion is many times slower than Python's for floats of many digits.
_DECODER = msgspec.json.Decoder(float_hook=float)
_INTEGERS = msgspec.json.Decoder(list[_Integer])
_INTEGER_LISTS = msgspec.json.Decoder(list[list[_Integer]])


class BodyError(ValueError):
    """A body that cannot be decoded, or exceeds a limit. status: of the answer. The message is one sentence."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class IncomingBody:
    """A body that arrives in parts. It is refused as soon as it exceeds a limit, and is then no longer kept."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.problem: BodyError | None = None
        self._num_measured = 0
        self._num_quotes = self._num_elements = self._text_bytes = self._structure_bytes = 0
        self._in_string = False
        self._escape = b""  # a backslash at the end of what was measured, whose character has not arrived

    def add(self, part: bytes) -> None:
        """Append `part`. Sets `problem` if the body exceeds a limit."""
        if self.problem is not None:
            return
        self.content += part
        if len(self.content) <= SMALL_BODY:
            return
        with memoryview(self.content) as view:
            unmeasured = bytes(view[self._num_measured :])
        self._num_measured = len(self.content)
        self._measure(unmeasured)
        if self._num_quotes > 2 * MAX_BODY_STRINGS:
            self._refuse(f"The body has more than {MAX_BODY_STRINGS} strings.")
        elif self._num_elements > MAX_BODY_ELEMENTS:
            self._refuse(f"The body has more than {MAX_BODY_ELEMENTS} elements.")
        elif self._text_bytes > MAX_TEXT:
            self._refuse(f"The body's strings have more than {MAX_TEXT} bytes.")
        elif self._structure_bytes > MAX_STRUCTURE:
            self._refuse(f"The body has more than {MAX_STRUCTURE} bytes outside of its strings.")

    def _measure(self, part: bytes) -> None:
        unescaped = _without_escapes(self._escape + part)
        self._escape = b"\\" if unescaped.endswith(b"\\") else b""
        num_quotes = unescaped.count(b'"')
        self._num_quotes += num_quotes
        if self._num_quotes > 2 * MAX_BODY_STRINGS:  # splitting would take long
            return
        # Every second part between quotes lies outside of the strings.
        structure = b"".join(unescaped.split(b'"')[1 if self._in_string else 0 :: 2])
        self._in_string ^= num_quotes % 2 == 1
        self._structure_bytes += len(structure)
        self._text_bytes += len(part) - len(structure)
        self._num_elements += sum(map(structure.count, (b",", b"[", b"{")))

    def _refuse(self, sentence: str) -> None:
        self.problem = BodyError(sentence, 413)
        self.content = bytearray()


def decode_body(body: bytes | bytearray, fields: msgspec.json.Decoder[Any]) -> Any:
    """The value of a JSON body. fields: from `field_decoder`; other fields of a large body are left out.

    Raises `BodyError`.
    """
    try:
        if len(body) <= SMALL_BODY:
            return _DECODER.decode(body)
        raw_fields = fields.decode(body)
        return {
            name: _decode_field(name, bytes(raw))
            for name in raw_fields.__struct_fields__
            if isinstance(raw := getattr(raw_fields, name), msgspec.Raw)
        }
    except RecursionError:
        raise BodyError("The body's JSON is nested too deeply.") from None
    except UnicodeDecodeError:
        raise BodyError("The body is not valid UTF-8.") from None
    except msgspec.ValidationError as error:
        raise BodyError(f"The body is not accepted: {error}.") from None
    except msgspec.DecodeError as error:
        if len(body) <= SMALL_BODY and _LONE_SURROGATE.search(body):
            raise BodyError("The body contains a lone surrogate, which is not a valid Unicode character.") from None
        raise BodyError(f"The body is not valid JSON: {error}.") from None


def field_decoder(model: type[RequestModel]) -> msgspec.json.Decoder[Any]:
    """Splits an object into the undecoded values of the fields that `model` knows."""
    fields = [(name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in model.known_fields()]
    return msgspec.json.Decoder(msgspec.defstruct(f"Raw{model.__name__}", fields, kw_only=True))


def _decode_field(name: str, raw: bytes) -> Any:
    if raw.startswith(b'"'):
        return _DECODER.decode(raw)
    if not raw.translate(None, _INTEGER_LIST_BYTES):
        if raw.count(b",") >= MAX_INTEGERS or raw.count(b"[") > MAX_ELEMENTS:
            raise BodyError(f"{name} has more than {MAX_INTEGERS} elements or {MAX_ELEMENTS} lists.", 413)
        if not raw.startswith(b"["):
            _check_numbers(name, raw)
            return _DECODER.decode(raw)
        return (_INTEGER_LISTS if raw[1:].lstrip(_WHITESPACE).startswith(b"[") else _INTEGERS).decode(raw)
    # Without escapes, every second part between quotes lies outside of the strings.
    unescaped = _without_escapes(raw)
    if unescaped.count(b'"') > 2 * MAX_ELEMENTS:
        raise BodyError(f"{name} has more than {MAX_ELEMENTS} elements.", 413)
    structure = b"".join(unescaped.split(b'"')[::2]).translate(None, _WHITESPACE)
    if sum(map(structure.count, (b",", b":", b"[", b"{"))) > MAX_ELEMENTS:
        raise BodyError(f"{name} has more than {MAX_ELEMENTS} elements.", 413)
    _check_numbers(name, structure)
    return _DECODER.decode(raw)


def _without_escapes(raw: bytes) -> bytes:
    """`raw` without escaped quotes and backslashes. The length stays the same."""
    return raw.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in raw else raw


def _check_numbers(name: str, structure: bytes) -> None:
    # The time for converting an integer is quadratic in its digits.
    if _LONG_NUMBER.search(structure):
        raise BodyError(f"{name} contains a number of more than {_MAX_NUMBER} characters.")


class InvalidFieldError(HTTPException):
    """A 400 about a field of a body. FastAPI passes no other errors on from `json()`."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(400, message)
        self.param = param


def _decode_model(body: bytes, fields: msgspec.json.Decoder[Any], model: type[RequestModel]) -> RequestModel:
    value = decode_body(body, fields)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InvalidFieldError(*describe_validation(error.errors(include_url=False))) from None


class _JsonRequest(Request):
    """A request whose `json()` is `decode_body`, or, of a large body, the model.

    The rest of a body that is refused is received without being kept: if the connection were closed, the client might not read
    the answer.
    """

    fields: msgspec.json.Decoder[Any]
    model: type[RequestModel]
    _content: bytearray | None = None

    async def body(self) -> bytes:
        if self._content is None:
            incoming = IncomingBody()
            async for part in self.stream():
                incoming.add(part)
            if incoming.problem is not None:
                raise HTTPException(incoming.problem.status, str(incoming.problem))
            self._content = incoming.content
        return self._content  # type: ignore[return-value]

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= SMALL_BODY:
                value = decode_body(body, self.fields)
            else:
                # Validating thousands of messages takes long, too. FastAPI takes the model's instance as it is.
                work = partial(copy_context().run, _decode_model, body, self.fields, self.model)
                async with _DECODING_TURNS.turn():
                    value = await asyncio.get_running_loop().run_in_executor(_DECODING, work)
        except BodyError as error:
            raise HTTPException(error.status, str(error)) from error
        note_user(value)
        return value


class JsonRoute(APIRoute):
    """A route whose body, if it has one, must be JSON and is decoded with `decode_body`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        model: Any = self.body_field.field_info.annotation
        assert issubclass(model, RequestModel)
        fields = field_decoder(model)

        async def handle(request: Request) -> Response:
            check_content_type(request)
            json_request = _JsonRequest(request.scope, request.receive)
            json_request.fields, json_request.model = fields, model
            return await handler(json_request)

        return handle


def check_content_type(request: Request) -> None:
    """Raise HTTP 415 unless the content type is JSON. Without a content type, raise it for requests of web pages (header Origin).

    This keeps web pages of other origins out: for JSON a browser first asks the server (a CORS preflight), for other content types it
    does not.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json" or (not content_type and "origin" not in request.headers):
        return
    given = f"'{content_type:.100}'" if content_type else "none"
    raise HTTPException(415, f"The header Content-Type must be 'application/json', got {given}.")
