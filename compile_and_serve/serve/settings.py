"""`ServerSettings`: the options of the HTTP server."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compile_and_serve.runtime.logs import LogFormat
from compile_and_serve.serve.http_protocol import ConnectionLimits
from compile_and_serve.serve.tls import TlsSettings

MAX_API_SERVERS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Options of the API server.

    served_model_names: values that clients may give in `model`. Answers and metrics carry the first.
    api_server_count: API processes that share the port and the engine.
    uds: Unix socket to listen on, instead of host and port. tls: None is plain HTTP.
    api_keys: each is accepted as `Authorization: Bearer`. Empty: no key is needed. With several keys, requests share cached
        prefixes only with requests of the same key.
    admin_keys: needed for admin and LoRA routes; empty: the other keys open these too. admin_routes: whether to serve admin routes.
    allowed_origins: origins whose web pages may call the server from a browser; "*" allows all. Empty: none.
    chat_template: source or file of a template that replaces the model's own.
    default_sampling: values for sampling fields that a request leaves out, from the model's generation_config.json.
    override_sampling: values that come before those of generation_config.json.
    tokenizer_info: whether to serve /tokenizer_info.
    priorities: whether requests may have a priority (scheduling policy "priority").
    max_body_bytes: larger request bodies are refused. `json_body` has further limits for bodies of more than 64 KiB.
    request_timeout: seconds after which a request ends with 504; None is no limit.
    stream_keepalive: seconds of silence after which a stream gets a comment; 0: none. throughput_log: interval in seconds of the
        log line under load; 0: none. log_format: of this process and of those that it starts.
    otlp_traces_endpoint: where traces are sent; None: there are none.
    shutdown_timeout: seconds that running requests get to finish after the first SIGINT or SIGTERM.
    graphs_dir: the dump of the model's compilation, shown at /graphs. None: no such page.
    tool_call_parser, reasoning_parser: names of parsers. None: the one whose format the chat template uses.
    enable_auto_tool_choice: refuse to start without a tool parser.
    lora_modules: (name, folder) of the adapters that are loaded at the start.
    lora_dir: adapters below this folder can be loaded by requests. None: requests load none.
    prompt_tokens_details: whether usage includes the number of cached prompt tokens, which reveals whether another request
        had the same prefix.
    response_store_bytes: memory for the responses of /v1/responses that clients may fetch or continue. 0: none is stored.
    response_store_seconds: time after which a stored response is dropped.
    """

    served_model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    api_server_count: int = 1
    tls: TlsSettings | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_routes: bool = False
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    chat_template: str | None = None
    response_role: str = "assistant"
    return_tokens_as_token_ids: bool = False
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)
    override_sampling: Mapping[str, float | int] = field(default_factory=dict)
    tokenizer_info: bool = False
    priorities: bool = False
    max_body_bytes: int = 4 * 1024 * 1024
    shutdown_timeout: float = 30.0
    log_level: str = "info"
    log_format: LogFormat = "text"
    access_log: bool = True
    throughput_log: float = 10.0
    otlp_traces_endpoint: str | None = None
    request_timeout: float | None = None
    stream_keepalive: float = 15.0
    graphs_dir: Path | None = None
    prompt_tokens_details: bool = False
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    enable_auto_tool_choice: bool = False
    lora_modules: tuple[tuple[str, Path], ...] = ()
    lora_dir: Path | None = None
    response_store_bytes: int = 0
    response_store_seconds: float = 86400.0

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        if self.host == "localhost" or self.uds is not None:
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
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ValueError(f"api_server_count must be in [1, {MAX_API_SERVERS}], got {self.api_server_count}.")
        if not all(self.admin_keys):
            raise ValueError("admin_keys must not contain an empty key.")
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ValueError(f"request_timeout must be more than 0 seconds, got {self.request_timeout}.")
        for name in ("stream_keepalive", "throughput_log"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 seconds, got {getattr(self, name)}.")
        if not self.response_role:
            raise ValueError("response_role must not be empty.")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ValueError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}.")
        if self.response_store_bytes < 0 or not self.response_store_seconds > 0:
            raise ValueError("response_store_bytes must be at least 0, and response_store_seconds above 0.")
