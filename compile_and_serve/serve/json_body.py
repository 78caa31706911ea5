"""Decodes JSON request bodies with bounded time and memory.

Decoding holds the GIL, also in a thread, so that a body of millions of elements would stop the event loop. A large body is
therefore split into its fields first, without decoding them, and each field's elements are counted before it is decoded.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from compile_and_serve.serve.protocol.fields import RequestModel

SMALL_BODY = 64 * 1024  # bytes; smaller bodies hold few elements and are decoded at once
MAX_ELEMENTS = 1 << 16  # JSON values in a field of a large body, except in lists of integers
MAX_INTEGERS = 1 << 20  # integers in a field
_MAX_NUMBER = 32  # characters of a number

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


def decode_body(body: bytes, fields: msgspec.json.Decoder[Any]) -> Any:
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
    unescaped = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in raw else raw
    if unescaped.count(b'"') > 2 * MAX_ELEMENTS:
        raise BodyError(f"{name} has more than {MAX_ELEMENTS} elements.", 413)
    structure = b"".join(unescaped.split(b'"')[::2]).translate(None, _WHITESPACE)
    if sum(map(structure.count, (b",", b":", b"[", b"{"))) > MAX_ELEMENTS:
        raise BodyError(f"{name} has more than {MAX_ELEMENTS} elements.", 413)
    _check_numbers(name, structure)
    return _DECODER.decode(raw)


def _check_numbers(name: str, structure: bytes) -> None:
    # The time for converting an integer is quadratic in its digits.
    if _LONG_NUMBER.search(structure):
        raise BodyError(f"{name} contains a number of more than {_MAX_NUMBER} characters.")


class _JsonRequest(Request):
    """A request whose `json()` is `decode_body`."""

    fields: msgspec.json.Decoder[Any]

    async def json(self) -> Any:
        body = await self.body()
        try:
            if len(body) <= SMALL_BODY:
                return decode_body(body, self.fields)
            return await asyncio.to_thread(decode_body, body, self.fields)
        except BodyError as error:
            raise HTTPException(error.status, str(error)) from error


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
            _check_content_type(request)
            json_request = _JsonRequest(request.scope, request.receive)
            json_request.fields = fields
            return await handler(json_request)

        return handle


def _check_content_type(request: Request) -> None:
    """Raise HTTP 415 unless the content type is JSON. Without a content type, raise it for requests of web pages (header Origin).

    This keeps web pages of other origins out: for JSON a browser first asks the server (a CORS preflight), for other content types it
    does not.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == "application/json" or (not content_type and "origin" not in request.headers):
        return
    given = f"'{content_type:.100}'" if content_type else "none"
    raise HTTPException(415, f"The header Content-Type must be 'application/json', got {given}.")
