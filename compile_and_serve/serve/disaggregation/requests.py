"""What a router reads of a request, and what it sends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from compile_and_serve.runtime.connector.handover.params import OWN, early_params

PATHS = ("/v1/chat/completions", "/v1/completions")
PARAMS = "kv_transfer_params"
_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Hop by hop, or about a body that is written anew.
_NOT_PASSED = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "accept-encoding"}


def can_be_split(body: Any) -> bool:
    """Whether one server can compute the prompt and another one generate: a body of one sequence."""
    if not isinstance(body, dict) or body.get("n") not in (None, 1) or body.get("use_beam_search") or body.get(PARAMS):
        return False
    if body.get("echo") or body.get("prompt_logprobs") is not None or body.get("max_tokens") == 0:
        return False  # they want something of all of the prompt's tokens from the server that answers
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or len(prompt) == 1 or all(isinstance(one, int) for one in prompt)


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """What stands for the prompt, where its tokens are not known: equal beginnings of prompts have equal beginnings here."""
    parts = [body.get("model"), body.get("tools"), body.get("messages") or body.get("prompt") or body.get("input")]
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def prompt_request(body: Mapping[str, Any], early: str = "") -> dict[str, Any]:
    """The request for the server that computes the prompt: it ends after one token by itself. early: name of the lease of what it has
    computed before; "": none.
    """
    return _unstreamed(body) | {PARAMS: _ASK | ({OWN: {"early": early}} if early else {})}


def early_request(body: Mapping[str, Any], giver: Mapping[str, Any], early: str) -> dict[str, Any]:
    """The request with which the server that will generate loads what another one computes now: see `early_params`."""
    return _unstreamed(body) | {PARAMS: early_params(giver, early)}


def offers_early(params: Mapping[str, Any]) -> bool:
    """Whether the server whose answer this is lends blocks of prompts that it computes."""
    own = params.get(OWN)
    return isinstance(own, dict) and own.get("offers_early") is True


def _unstreamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("stream", "stream_options")} | {"stream": False}


def passed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a request or an answer that go on to the other side."""
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_PASSED}
