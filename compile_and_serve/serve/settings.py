"""`ServerSettings`: the options of the HTTP server."""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from compile_and_serve.option_fields import MISSING, json_object, option, parse_size
from compile_and_serve.runtime.logs import LogFormat
from compile_and_serve.runtime.sampling_params import RepetitionDetectionParams
from compile_and_serve.serve.tenant_options import TenantOptions, read_tenants
from compile_and_serve.serve.tls import TlsSettings

MAX_API_SERVERS = 64
MetricsPrefix = Literal["cas", "vllm", "both"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of one server.

    connections: None: as many as the limit on open files allows. If there are more, the one that has kept the server waiting
        for a request the longest is closed; if there is none, the new one is answered with 503.
    headers, header_bytes: of one request, the request line included.
    header_seconds: from the connection, or from the first byte of a later request, to the end of the headers.
    body_seconds: from the end of the headers to the end of the body.
    write_seconds: for which a client may leave a response unread.
    idle_seconds: between two requests of a connection.
    pipelined: requests of a connection that may wait for an earlier one.
    """

    connections: int | None = None
    headers: int = 128
    header_bytes: int = 64 * 1024
    header_seconds: float = 20.0
    body_seconds: float = 120.0
    write_seconds: float = 60.0
    idle_seconds: int = 30
    pipelined: int = 16


def _absolute(path: Path) -> Path:
    return path.resolve()


def _named_paths(given: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    return tuple((name, Path(path).resolve()) for one in given for name, path in _adapters(one))


def _adapters(text: str) -> list[tuple[str, str]]:
    """The names and paths in NAME=PATH, in vLLM's JSON object, or in a list of these."""
    if text.lstrip().startswith(("{", "[")):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--lora-modules: {text!r:.200} is not valid JSON ({error}).") from None
        entries = found if isinstance(found, list) else [found]
        pairs = [(one.get("name", ""), one.get("path", "")) if isinstance(one, dict) else ("", "") for one in entries]
    else:
        name, _, path = text.partition("=")
        pairs = [(name, path)]
    if not all(isinstance(part, str) and part for pair in pairs for part in pair):
        raise ValueError(f'--lora-modules takes NAME=PATH or {{"name": NAME, "path": PATH}}, got {text!r:.200}.')
    return pairs


_MOST_TOKENS = "max_new_tokens"  # in --override-generation-config, as in vLLM: of every answer


def parse_sampling_defaults(given: str | None) -> dict[str, float | int]:
    """The value of --override-generation-config, with `max_tokens` for max_new_tokens.

    Raises `ValueError` for anything but numbers under known names.
    """
    from compile_and_serve.runtime.text.load_tokenizer import GENERATION_DEFAULTS

    found = json_object("--override-generation-config")(given or "{}")
    for name, value in found.items():
        is_number = isinstance(value, int if name == _MOST_TOKENS else (int, float)) and not isinstance(value, bool)
        if name not in (*GENERATION_DEFAULTS, _MOST_TOKENS) or not is_number:
            known = ", ".join((*GENERATION_DEFAULTS, _MOST_TOKENS))
            raise ValueError(f"--override-generation-config takes numbers for {known}, got {name!r:.50}: {value!r:.50}.")
    return {"max_tokens" if name == _MOST_TOKENS else name: value for name, value in found.items()}


def parse_repetition_detection(given: str) -> RepetitionDetectionParams:
    """The value of --repetition-detection. Raises `ValueError` unless it is an object of the three fields."""
    try:
        params = msgspec.json.decode(given, type=RepetitionDetectionParams)
    except msgspec.MsgspecError as error:
        fields = ", ".join(RepetitionDetectionParams.__struct_fields__)
        raise ValueError(f"--repetition-detection must be a JSON object with {fields} ({error}), got {given!r:.200}.") from None
    params.verify()
    return params


_server_option, _connection_option = partial(option, panel="Server"), partial(option, panel="Connections")
_replica_option = partial(option, panel="Ranks and replicas")
_log_option = partial(option, panel="Logs and traces")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Options of the API server.

    served_model_names: answers and metrics carry the first.
    tls: None is plain HTTP. api_keys, admin_keys: empty: no key is needed, or none of their own for admin and LoRA routes. tenants: entries
        for some of api_keys.
    default_sampling: values for sampling fields that a request leaves out, from the model's generation_config.json.
    priorities: whether requests may have a priority (scheduling policy "priority").
    max_body_bytes: `json_body` has further limits for bodies of more than 64 KiB.
    graphs_dir: the dump of the model's compilation, shown at /graphs. None: no such page.
    lora_modules: (name, folder) of the adapters that are loaded at the start.
    """

    host: str = _server_option("127.0.0.1", "Address to listen on.")
    port: int = _server_option(8000, "Port to listen on; 0: any free port.")
    served_model_names: tuple[str, ...] = _server_option(
        MISSING, "Name that clients give in `model` (repeatable). By default the model argument.", flags=("--served-model-name",)
    )
    allowed_origins: tuple[str, ...] = _server_option(
        (), "Origin whose web pages may call the server from a browser, or '*' for all (repeatable). By default none."
    )
    allowed_hosts: tuple[str, ...] = _server_option(
        (),
        "Host name, besides localhost, that requests may have in `Host` while the server listens on loopback and has no API keys; '*': any "
        "(repeatable). It keeps web pages out whose own name resolves to this machine.",
    )
    max_body_bytes: int = _server_option(
        4 * 1024 * 1024,
        "Largest request body; larger ones get HTTP 413.",
        flags=("--max-body-size",),
        metavar="SIZE",
        flag_type=str,
        flag_default="4MiB",
        parse=parse_size,
    )
    max_audio_bytes: int = _server_option(
        26 * 1024 * 1024,
        "Largest body with a file for /v1/audio/transcriptions and /v1/audio/translations; larger ones get HTTP 413.",
        flags=("--max-audio-size",),
        metavar="SIZE",
        flag_type=str,
        flag_default="26MiB",
        parse=parse_size,
    )
    prompt_tokens_details: bool = _server_option(
        False,
        "Report the number of cached prompt tokens in usage. It reveals whether others sent the same prefix.",
        flags=("--enable-prompt-tokens-details",),
    )
    root_path: str = _server_option("", "Path prefix under which a proxy exposes the server.")
    chat_template: str | None = _server_option(None, "A Jinja file or Jinja source that replaces the model's chat template.")
    chat_template_content_format: Literal["auto", "string", "openai"] = _server_option(
        "auto", "How the chat template takes a message's content: as a text, or as OpenAI's list of parts. auto: found in the template."
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = _server_option(
        None,
        "Variables of the chat template for requests that do not set them, e.g. '{\"enable_thinking\": false}'.",
        metavar="JSON",
        flag_type=str,
        parse=json_object("--default-chat-template-kwargs"),
    )
    reasoning_effort_map: Mapping[str, str] | None = _server_option(
        None,
        'Words that the chat template gets for a request\'s reasoning effort, e.g. \'{"medium": "low"}\'.',
        metavar="JSON",
        flag_type=str,
        parse=json_object("--reasoning-effort-map"),
    )
    tool_call_parser: str | None = _server_option(
        None,
        "Format in which the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, deepseek_v3, pythonic, "
        "granite, phi4, or a parser of your own (an entry point's name, or module:Class). By default detected from the chat "
        "template.",
    )
    enable_auto_tool_choice: bool = _server_option(
        False, "Refuse to start without a tool parser. With one, tool_choice 'auto' is always accepted."
    )
    reasoning_parser: str | None = _server_option(
        None,
        "Format in which the model writes its reasoning: deepseek_r1, qwen3, granite, gpt-oss, or a parser of your own. "
        "By default detected from the chat template.",
    )
    escape_special_tokens: bool = _server_option(
        True,
        "Special tokens in the text of users, systems and tools of conversations stay text. Raw prompts and the text of the assistant "
        "keep theirs.",
    )
    response_role: str = _server_option("assistant", "Role of the generated messages.")
    return_tokens_as_token_ids: bool = _server_option(False, "Write tokens in logprobs as token_id:N instead of their text.")
    response_store_bytes: int = _server_option(
        0,
        "Memory for stored responses of /v1/responses, e.g. 256MiB. They are kept for --response-store-seconds. When newer "
        "ones need the room, the API key with the most loses its oldest. Only the API key that created a response can "
        "read it. By default none is stored.",
        flags=("--response-store",),
        metavar="SIZE",
        flag_type=str,
        flag_default=None,
        parse=parse_size,
    )
    response_store_seconds: float = _server_option(86400.0, "Time after which a stored response is dropped.")
    max_background_responses: int = _server_option(
        64, "Responses with background=true that one API key may have in progress; further ones get HTTP 429."
    )
    generation_config: str = _server_option(
        "auto", "Where sampling defaults come from. auto: the model's generation_config.json; vllm: none; FOLDER: that folder's file."
    )
    override_sampling: Mapping[str, float | int] = option(
        MISSING,
        "Sampling defaults that come before those of generation_config.json, e.g. '{\"temperature\": 0.5}'. max_new_tokens limits answers.",
        panel="Server",
        flags=("--override-generation-config",),
        metavar="JSON",
        default_factory=dict,
        flag_type=str,
        parse=parse_sampling_defaults,
    )
    repetition_detection: RepetitionDetectionParams | None = _server_option(
        None,
        'End outputs that repeat themselves, unless a request says otherwise, e.g. \'{"max_pattern_size": 32, "min_count": 8}\': '
        "8 copies of a pattern of up to 32 tokens. By default off.",
        metavar="JSON",
        flag_type=str,
        parse=parse_repetition_detection,
    )
    open_schemas: bool = _server_option(
        False,
        "Let objects in JSON schemas of tools and response_format have properties that the schema does not declare. By default they may "
        "only where it has additionalProperties.",
    )
    force_include_usage: bool = _server_option(
        False, "End every stream with its usage, whether or not the request asks for it.", flags=("--enable-force-include-usage",)
    )
    disable_fastapi_docs: bool = _server_option(False, "Serve neither /docs, /redoc nor /openapi.json.")
    tokenizer_info: bool = _server_option(
        False, "Serve /tokenizer_info, with special tokens and chat templates.", flags=("--enable-tokenizer-info-endpoint",)
    )
    shutdown_timeout: float = _server_option(30.0, "Seconds that running requests get to finish after SIGINT or SIGTERM.")
    lora_modules: tuple[tuple[str, Path], ...] = option(
        (),
        "Adapter to load at the start, which requests select by `model` (repeatable).",
        panel="LoRA",
        metavar="NAME=PATH",
        parse=_named_paths,
    )
    lora_dir: Path | None = option(
        None,
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters below this folder. They need --admin-api-key or "
        "--allow-lora-without-admin-key.",
        panel="LoRA",
    )
    allow_lora_without_admin_key: bool = option(
        False, "Without an admin key, whoever may send requests may load and unload adapters.", panel="LoRA"
    )
    graphs_dir: Path | None = option(
        None,
        "Show the compilation at /graphs. The start then captures the model again instead of loading an artifact.",
        panel="Compiler",
        flags=("--enable-graphs",),
        flag_type=bool,
        flag_default=False,
    )
    api_server_count: int = _connection_option(
        1, "API processes that share the port, for more streams than one core can write. They share one engine."
    )
    has_supervisor: bool = _replica_option(
        False,
        "Run a server for each replica, on the ports from --port on, for a load balancer of your own. A supervisor starts a replica again "
        "that has ended or does not answer, while the others serve.",
        flags=("--data-parallel-multi-port-external-lb", "-dpm"),
    )
    supervisor_port: int = _replica_option(
        9256, "Port of that supervisor's /health, /health/liveness and /health/readiness.", flags=("--data-parallel-supervisor-port",)
    )
    probe_interval: float = _replica_option(
        5.0, "How often the supervisor asks each replica for /health.", flags=("--dp-supervisor-probe-interval-s",), metavar="SECONDS"
    )
    probe_timeout: float = _replica_option(
        5.0, "How long it waits for an answer.", flags=("--dp-supervisor-probe-timeout-s",), metavar="SECONDS"
    )
    probe_failures: int = _replica_option(
        3, "A replica that has failed so many times in a row is started again.", flags=("--dp-supervisor-probe-failure-threshold",)
    )
    headless: bool = _replica_option(False, "Run the ranks of this host without a server: for the hosts that are not --node-rank 0.")
    uds: Path | None = _connection_option(None, "Listen on this Unix socket, which only your user can open, instead of --host and --port.")
    tls: TlsSettings | None = None
    request_timeout: float | None = _connection_option(
        None,
        "End a request that takes longer with HTTP 504. A client can set an earlier deadline with the header "
        "X-Request-Timeout. By default there is no limit.",
        metavar="SECONDS",
    )
    stream_keepalive: float = _connection_option(
        15.0, "Send a comment in a stream that was silent for this long, so that proxies keep it open; 0: never.", metavar="SECONDS"
    )
    connection_limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    tenants: tuple[TenantOptions, ...] = option(
        (),
        "YAML file with API keys and, for each, a name, a weight and limits: the keys share the engine by weight. Every key of "
        "--api-key-file without an entry has the weight 1.",
        panel="Access",
        metavar="FILE",
        flag_type=Path,
        flag_default=None,
        parse=read_tenants,
    )
    fair_by_user: bool = option(
        False,
        "Share what an API key gets among its users, too: those whom requests name in `user` (metadata.user_id of Anthropic's API).",
        panel="Access",
    )
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_routes: bool = option(
        False,
        "Serve /sleep, /wake_up, /is_sleeping and /reset_prefix_cache. Without an admin key, whoever may send requests may use them.",
        panel="Access",
        flags=("--enable-admin-routes",),
    )
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    priorities: bool = False
    log_level: str = "info"
    log_format: LogFormat = _log_option("text", "json: one JSON object per line, of all processes.")
    access_log: bool = _log_option(True, "Log every request.")
    profile_dir: Path | None = _log_option(
        None, "Serve /start_profile and /stop_profile, which write Chrome traces to this folder. They are admin routes.", parse=_absolute
    )
    throughput_log: float = _log_option(10.0, "While there is load, log the throughput at this interval; 0: never.", metavar="SECONDS")
    metrics_prefix: MetricsPrefix = _log_option(
        "both", "How names under /metrics begin: with cas:, with vllm: as dashboards for vLLM expect, or all names with both."
    )
    otlp_traces_endpoint: str | None = _log_option(
        None,
        "Send OpenTelemetry traces to this OTLP/HTTP endpoint, e.g. http://localhost:4318/v1/traces. Needs compile-and-serve[otel].",
        metavar="URL",
    )

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
        if not 0 < self.supervisor_port <= 65535:
            raise ValueError(f"supervisor_port must be in [1, 65535], got {self.supervisor_port}.")
        if not (self.probe_interval > 0 and self.probe_timeout > 0 and self.probe_failures > 0):
            raise ValueError("probe_interval, probe_timeout and probe_failures must be above 0.")
        if any(tenant.key not in self.api_keys for tenant in self.tenants):
            raise ValueError("The keys of tenants must be among api_keys.")
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
        if self.max_background_responses < 0:
            raise ValueError(f"max_background_responses must be at least 0, got {self.max_background_responses}.")
        if self.response_store_bytes < 0 or not self.response_store_seconds > 0:
            raise ValueError("response_store_bytes must be at least 0, and response_store_seconds above 0.")
