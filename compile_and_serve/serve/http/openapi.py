"""The OpenAPI document: every error of every route, in the shape of its API, and the forms of a key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from compile_and_serve.serve.errors import anthropic_error_body, error_body, is_anthropic

_BODY_ERRORS = {
    "413": "The body is larger than the server's limit",
    "415": "The body is not declared as JSON",
    "503": "The queue is full or the engine is down (Retry-After says when to try again)",
    "504": "The request did not end before its deadline",
}
_EXAMPLES = {
    "Error": error_body(400, "temperature must be in [0, 1000000], got -1.0.", "temperature"),
    "AnthropicError": anthropic_error_body(400, "temperature must be in [0, 1000000], got -1.0.", "temperature"),
}
_TEXT = {"type": "string"}
_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {**_TEXT, "description": "One sentence."},
                    "type": _TEXT,
                    "param": {"anyOf": [_TEXT, {"type": "null"}], "description": "The field that is wrong."},
                    "code": {"type": "integer", "description": "The HTTP status."},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        },
    },
}
_KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}


def describe_errors(app: FastAPI, *, needs_key: bool) -> None:
    """Complete the application's OpenAPI document. needs_key: whether requests must have an API key.

    FastAPI's own validation error, a 422, is left out: here validation errors are a 400.
    """
    original = app.openapi
    complete: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not complete:
            complete.update(_complete(original(), needs_key=needs_key))
        return complete

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(schema: dict[str, Any], *, needs_key: bool) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(_SCHEMAS)
    if needs_key:
        components["securitySchemes"] = _KEYS
        schema["security"] = [{name: []} for name in _KEYS]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _add_errors(operation, path)
    return schema


def _add_errors(operation: dict[str, Any], path: str) -> None:
    responses = operation["responses"]
    if responses.pop("422", None) is not None:  # the route has a body or parameters
        responses["400"] = {"description": "The request is invalid"}
    if "requestBody" in operation:
        for status, description in _BODY_ERRORS.items():
            responses.setdefault(status, {"description": description})
    name = "AnthropicError" if is_anthropic(path) else "Error"
    for status, response in responses.items():
        if status >= "400":
            content = response.setdefault("content", {}).setdefault("application/json", {})
            content["schema"] = {"$ref": f"#/components/schemas/{name}"}
    if "400" in responses:
        responses["400"]["content"]["application/json"]["example"] = _EXAMPLES[name]
