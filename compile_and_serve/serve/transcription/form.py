"""Reads a multipart form with an audio file."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from compile_and_serve.serve.errors import ApiError, describe_validation
from compile_and_serve.serve.protocol.fields import RequestModel
from compile_and_serve.serve.tenants.current import note_user

_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 1 << 20
_LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")

Form = TypeVar("Form", bound=RequestModel)


async def read_form(request: Request, model: type[Form], allowed_origins: tuple[str, ...]) -> tuple[Form, bytes]:
    """The form's fields, and its file's bytes. Raises HTTP errors and `ApiError`."""
    _check_headers(request, allowed_origins)
    fields: dict[str, Any] = {}
    data: bytes | None = None
    async with request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES) as form:
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                if name != "file":
                    raise ApiError(400, f"The form has the file {name!r:.100}, but the audio must be the field file.", "file")
                data = await value.read()
                continue
            plain = name.removesuffix("[]")
            if plain in _LISTS:
                fields.setdefault(plain, []).append(value)
            else:
                fields[plain] = value
    if "file" in fields:
        raise ApiError(400, "file must be a file with a name, not a text.", "file")
    if data is None:
        raise ApiError(400, "The form has no file: send the audio as the field file.", "file")
    try:
        body = model.model_validate({name: value for name, value in fields.items() if value != "" or name == "prompt"})
    except ValidationError as error:
        raise ApiError(400, *describe_validation(error.errors(include_url=False))) from None
    note_user({"user": fields.get("user")})
    return body, data


def _check_headers(request: Request, allowed_origins: tuple[str, ...]) -> None:
    """Browsers send forms of other origins' pages without asking the server before, so that their header says where they come from."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        given = f"'{content_type:.100}'" if content_type else "none"
        raise HTTPException(415, f"The header Content-Type must be 'multipart/form-data', got {given}.")
    origin = request.headers.get("origin")
    if origin is None or "*" in allowed_origins or origin in allowed_origins:
        return
    if urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise HTTPException(403, "Forms of web pages of other origins are refused: allow theirs with --allowed-origins.")
