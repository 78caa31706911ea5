"""Structured output in requests: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Any

import msgspec

from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.serve.errors import ApiError

_FIELDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_SETTINGS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_IGNORED = ("disable_fallback",)  # of vLLM, where it chooses a library


def structured_params(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None, *, open_schemas: bool = False
) -> StructuredOutputsParams | None:
    """The form that a request's output must have, or None. Raises a 400 that names the wrong field.

    open_schemas: objects of a response_format may have properties that its schema does not declare.
    """
    by_format = None if response_format is None else _from_response_format(response_format, closes=not open_schemas)
    by_fields = None if structured_outputs is None else _from_structured_outputs(structured_outputs)
    if by_format is not None and by_fields is not None:
        raise ApiError(400, "response_format and structured_outputs cannot be combined.", "structured_outputs")
    return by_fields if by_format is None else by_format


def _from_response_format(given: dict[str, Any], *, closes: bool) -> StructuredOutputsParams | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        inner = given.get("json_schema")
        if not isinstance(inner, dict):
            raise ApiError(400, "response_format.json_schema must be an object.", "response_format.json_schema")
        schema = inner.get("schema")
        if not isinstance(schema, (dict, bool)):
            param = "response_format.json_schema.schema"
            raise ApiError(400, f"{param} must be a JSON schema.", param)
        return StructuredOutputsParams(json=schema, disable_additional_properties=closes)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=given, disable_additional_properties=closes)
    raise ApiError(400, "response_format.type must be text, json_object, json_schema or structural_tag.", "response_format.type")


def _from_structured_outputs(given: dict[str, Any]) -> StructuredOutputsParams | None:
    fields = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    if not fields:
        return None
    for name in fields:
        if name not in (*_FIELDS, *_SETTINGS):
            known = ", ".join((*_FIELDS, *_SETTINGS))
            raise ApiError(400, f"structured_outputs has no field {name!r:.50}: known are {known}.", "structured_outputs")
    try:
        return msgspec.convert(fields, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"structured_outputs: {error}.", "structured_outputs") from error
