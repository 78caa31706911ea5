"""`ServerSettings`: the options of the HTTP server."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compile_and_serve.serve.http_protocol import ConnectionLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Options of the API server.

    served_model_names: values that clients may give in `model`. Answers and metrics carry the first.
    api_keys: each is accepted as `Authorization: Bearer`. Empty: no key is needed. With several keys, requests share cached
        prefixes only with requests of the same key.
    allowed_origins: origins whose web pages may call the server from a browser; "*" allows all. Empty: none.
    chat_template: source or file of a template that replaces the model's own.
    default_sampling: values for sampling fields that a request leaves out, from the model's generation_config.json.
    priorities: whether requests may have a priority (scheduling policy "priority").
    max_body_bytes: larger request bodies are refused. A body takes up to about 20 times its size in memory while it is read.
    shutdown_timeout: seconds that running requests get to finish after the first SIGINT or SIGTERM.
    graphs_dir: the dump of the model's compilation, shown at /graphs. None: no such page.
    template_timeout: seconds in which the chat template must render a conversation.
    tool_call_parser, reasoning_parser: names of parsers. None: the one whose format the chat template uses.
    enable_auto_tool_choice: refuse to start without a tool parser.
    lora_modules: (name, folder) of the adapters that are loaded at the start.
    lora_dir: adapters below this folder can be loaded by requests. None: requests load none.
    prompt_tokens_details: whether usage includes the number of cached prompt tokens, which reveals whether another request
        had the same prefix.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    chat_template: str | None = None
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    priorities: bool = False
    max_body_bytes: int = 4 * 1024 * 1024
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    access_log: bool = True
    graphs_dir: Path | None = None
    prompt_tokens_details: bool = False
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    template_timeout: float = 10.0
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    lora_modules: tuple[tuple[str, Path], ...] = ()
    lora_dir: Path | None = None

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise ValueError("served_model_names must contain at least one name, and no empty one.")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in [0, 65535], got {self.port}.")
        if not all(self.api_keys):
            raise ValueError("api_keys must not contain an empty key.")
        if not self.response_role:
            raise ValueError("response_role must not be empty.")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ValueError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}.")
