"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. `code` is the HTTP status.

Every failed request gets such a body, also where FastAPI's own validation rejects it.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from compile_and_serve.runtime.engine.client import EngineDeadError
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.input_processor import PromptTooLongError

logger = logging.getLogger(__name__)

MAX_ECHO = 200  # characters of a request's own content that an error message repeats
_MAX_MESSAGE = 1000
_RETRY_SECONDS = 1
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    500: "internal_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_ECHO


class ApiError(Exception):
    """An answer with a status other than 200. message: one sentence. param: the request field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class QueueFullError(Exception):
    """The server already holds as many requests as it accepts."""


@contextmanager
def user_errors(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a `ValueError` of the runtime into a 400.

    names: the runtime's name of a field → its name in the request, where the two differ.
    """
    try:
        yield
    except ValueError as error:
        message, param = str(error), "messages" if isinstance(error, ChatTemplateError) else None
        if isinstance(error, (SamplingParamsError, PromptTooLongError)):
            param = (names or {}).get(error.param, error.param)
            message = message.replace(f"{error.param} must", f"{param} must")
            if message.startswith(f"{error.param}:"):
                message = f"{param}{message.removeprefix(error.param)}"
        raise ApiError(400, message, param) from error


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON object that describes an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": status}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The HTTP response for an error. A 503 carries `Retry-After`."""
    extra = dict(headers or {})
    if status == 503:
        extra.setdefault("Retry-After", str(_RETRY_SECONDS))
    if status == 401:
        extra.setdefault("WWW-Authenticate", "Bearer")
    content = msgspec.json.encode(error_body(status, _encodable(message), param))
    return Response(content, status_code=status, media_type="application/json", headers=extra)


def to_api_error(error: Exception) -> ApiError:
    """The answer to an exception of a handler. Unexpected exceptions are logged and become a 500 without detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (EngineDeadError, QueueFullError)):
        return ApiError(503, str(error))
    logger.error("Unexpected error while answering a request.", exc_info=error)
    return ApiError(500, "The server failed on this request; its log has the details.")


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        api_error = to_api_error(error)
        return error_response(api_error.status, api_error.message, api_error.param)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"This server has no route {request.method} {request.url.path[:MAX_ECHO]}."
        elif error.status_code == 405:
            message = f"{request.url.path[:MAX_ECHO]} does not support {request.method}."
        return error_response(error.status_code, message, headers=error.headers)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = describe_validation(error.errors())
        return error_response(400, message, param)

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    for kind in (ApiError, EngineDeadError, QueueFullError, Exception):
        app.add_exception_handler(kind, on_error)


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """One sentence about pydantic's first error, and the field that it is about."""
    first = errors[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if not place:
        return f"The body must be a JSON object: {first['msg']}.", None
    param = ".".join(place)
    if first["type"] == "missing":
        return f"The field {param} is missing.", param
    # reprlib, because the plain repr of a large value takes long.
    return f"{param}: {first['msg'].rstrip('.')}, got {_REPR.repr(first.get('input')):.{MAX_ECHO}}.", param


def _encodable(message: str) -> str:
    # A lone surrogate that the message repeats cannot be encoded as UTF-8.
    return message.encode("utf-8", errors="replace").decode()
