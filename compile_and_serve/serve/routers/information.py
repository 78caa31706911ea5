"""`GET /tokenizer_info` (with a flag) and `GET /server_info` (an admin route)."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from compile_and_serve import __version__
from compile_and_serve.serve.admin import AdminRoute
from compile_and_serve.serve.context import Context
from compile_and_serve.serve.errors import user_errors
from compile_and_serve.serve.http.responses import json_response

tokenizer_router = APIRouter(tags=["Utility"])
admin_router = APIRouter(tags=["Admin"], route_class=AdminRoute)

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic", "msgspec")
# Settings without secrets, file names and addresses of other servers.
_SHOWN = (
    "served_model_names", "host", "port", "root_path", "api_server_count", "admin_routes", "tokenizer_info", "priorities",
    "allowed_origins", "max_body_bytes", "connection_limits", "request_timeout", "shutdown_timeout", "stream_keepalive",
    "log_level", "log_format", "access_log", "throughput_log", "default_sampling", "override_sampling", "response_role",
    "return_tokens_as_token_ids", "prompt_tokens_details", "tool_call_parser", "reasoning_parser",
    "enable_auto_tool_choice", "escape_special_tokens", "response_store_bytes", "response_store_seconds",
)  # fmt: skip


@tokenizer_router.get("/tokenizer_info", summary="The tokenizer's configuration")
async def tokenizer_info(context: Context) -> Response:
    """Special tokens, ids and chat templates, with the names of tokenizer_config.json."""
    with user_errors():
        tokenizer = context.inputs.require_tokenizer("tokenizer_info")
    template = context.settings.chat_template or tokenizer.chat_templates.get("default")
    return json_response(
        {
            **tokenizer.special_tokens,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": context.inputs.info.max_model_len,
            "eos_token_ids": tokenizer.eos_token_ids,
            "all_special_tokens": list(tokenizer.special_texts),
            "all_special_ids": list(tokenizer.special_texts.values()),
            "chat_template": template,
            "chat_templates": tokenizer.chat_templates,
        }
    )


@admin_router.get("/server_info", summary="Versions and options of the server")
async def server_info(context: Context) -> Response:
    """What the server and its engine run with. Keys, file names and addresses of other servers are left out."""
    settings = context.settings
    answer: dict[str, Any] = {
        "version": __version__,
        "python": sys.version.split()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name)) is not None},
        "models": [*settings.served_model_names, *context.adapters.names],
        "engine": msgspec.to_builtins(context.inputs.info),
        "server": msgspec.to_builtins({name: getattr(settings, name) for name in _SHOWN}),
    }
    return json_response(answer)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
