"""Checks of `kv_transfer_params`, before the request goes to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_and_serve.runtime.connector.handover.params import check_transfer_params
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.text.output_processor import CompletionOutput
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.fields import GenerationFields

FIELD = "kv_transfer_params"


def transfer_params(body: GenerationFields, info: EngineInfo, *, num_sequences: int) -> dict[str, Any] | None:
    """The request's, if it goes to another engine or comes from one. Raises a 400."""
    params = body.kv_transfer_params
    if not params:
        return None
    try:
        direction = check_transfer_params(params, info.kv_transfer)
    except ValueError as error:
        raise ApiError(400, str(error), FIELD) from error
    if direction is None:
        return None
    if num_sequences > 1 or body.use_beam_search:
        raise ApiError(400, "kv_transfer_params are of one sequence: send one prompt with n=1.", FIELD)
    if direction == "give" and body.stream:
        raise ApiError(400, "The answer with do_remote_decode is for the other engine, and has one token: set stream to false.", FIELD)
    return params


def transfer_fields(completions: Sequence[CompletionOutput]) -> dict[str, Any]:
    """What an answer says to the engine that continues it."""
    found = [one.kv_transfer for one in completions if one.kv_transfer is not None]
    return {FIELD: found[0]} if found else {}
