"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`. `code` is the HTTP status.

Every failed request gets such a body, also where FastAPI's own validation rejects it. Below `/v1/messages` the shape is
Anthropic's: `{"type": "error", "error": {"type", "message"}}`.
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
from starlette.types import Scope

from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.pooling.results import UnsupportedTaskError
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.input_processor import PromptTooLongError
from compile_and_serve.runtime.tools.tool_use import ToolUseError

logger = logging.getLogger(__name__)

MAX_ECHO = 200  # characters of a request's own content that an error message repeats
_MAX_MESSAGE = 1000
_RETRY_SECONDS = 1
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_ECHO


class ApiError(Exception):
    """An answer with a status other than 200. message: one sentence. param: the request field that is wrong.

    retry_after: seconds after which the client should try again; only for 429 and 503.
    """

    def __init__(self, status: int, message: str, param: str | None = None, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class ShuttingDownError(ApiError):
    """The server takes no new requests, or has ended this one, because it is shutting down."""

    def __init__(self) -> None:
        super().__init__(503, "The server is shutting down.")


class QueueFullError(Exception):
    """The server already holds as many requests as it accepts. retry_after: seconds after which one may fit."""

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def require_text(value: Any, where: str) -> str:
    """A part of a request's field that must be a text. where: its path, such as input[0].text. Raises a 400."""
    if not isinstance(value, str):
        raise ApiError(400, f"{where} must be a text.", where.partition("[")[0])
    return value


@contextmanager
def user_errors(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a `ValueError` of the runtime into a 400.

    names: the runtime's name of a field → its name in the request, where the two differ.
    """
    try:
        yield
    except ValueError as error:
        message, param = str(error), "messages" if isinstance(error, ChatTemplateError) else None
        if isinstance(error, (SamplingParamsError, PromptTooLongError, ToolUseError)):
            param = (names or {}).get(error.param, error.param)
            message = message.replace(f"{error.param} must", f"{param} must")
            if message.startswith(f"{error.param}:"):
                message = f"{param}{message.removeprefix(error.param)}"
        raise ApiError(400, message, param) from error


@contextmanager
def renamed_params(names: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[None]:
    """Name the fields in errors of the chat pipeline as another API does.

    names: chat's name of a field → the API's. texts: further replacements in messages.
    """
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            name = names.get(error.param, error.param)
            error.message, error.param = error.message.replace(error.param, name), name
        for text, replacement in texts.items():
            error.message = error.message.replace(text, replacement)
        raise


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON object that describes an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": status}}


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/")


def anthropic_error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON object that describes an error to Anthropic's clients. The message begins with the wrong field."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message[:_MAX_MESSAGE]}}


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None, *, path: str = ""
) -> Response:
    """The HTTP response for an error. A 503 carries `Retry-After`. path: of the request, which decides the body's shape."""
    extra = dict(headers or {})
    if status == 503:
        extra.setdefault("Retry-After", str(_RETRY_SECONDS))
    if status == 401:
        extra.setdefault("WWW-Authenticate", "Bearer")
    body = (anthropic_error_body if is_anthropic(path) else error_body)(status, _encodable(message), param)
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, media_type="application/json", headers=extra)


def to_api_error(error: Exception) -> ApiError:
    """The answer to an exception of a handler. Unexpected exceptions are logged and become a 500 without detail."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnsupportedTaskError):
        return ApiError(501, str(error))
    if isinstance(error, (EngineDeadError, QueueFullError)):
        return ApiError(503, str(error), retry_after=getattr(error, "retry_after", None))
    logger.error("Unexpected error while answering a request.", exc_info=error)
    return ApiError(500, "The server failed on this request; its log has the details.")


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer every error in OpenAI's shape."""

    async def on_error(request: Request, error: Exception) -> Response:
        api_error = to_api_error(error)
        return error_response(api_error.status, api_error.message, api_error.param, api_error.headers, path=path_of(request.scope))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"This server has no route {request.method} {request.url.path[:MAX_ECHO]}."
        elif error.status_code == 405:
            message = f"{request.url.path[:MAX_ECHO]} does not support {request.method}."
        param = getattr(error, "param", None)  # of an `InvalidFieldError`
        return error_response(error.status_code, message, param, error.headers, path=path_of(request.scope))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        message, param = describe_validation(error.errors())
        return error_response(400, message, param, path=path_of(request.scope))

    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    for kind in (ApiError, UnsupportedTaskError, EngineDeadError, QueueFullError, Exception):
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


def path_of(scope: Scope) -> str:
    """The path that the router matches: the request's, without the prefix of a proxy (`--root-path`).

    It must agree with Starlette's `get_route_path`: if they differed, a route could be reached without its key.
    """
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    rest = path.removeprefix(prefix)
    return rest if len(rest) + len(prefix) == len(path) and rest.startswith("/") else path


def _encodable(message: str) -> str:
    # A lone surrogate that the message repeats cannot be encoded as UTF-8.
    return message.encode("utf-8", errors="replace").decode()
