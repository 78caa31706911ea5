"""`compile-and-serve serve`: run the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compile_and_serve.serve.cli.flags import COMPILER_PANEL, LORA_PANEL, ModelArgument, parse_size
from compile_and_serve.serve.cli.output import StageDisplay, StageLog, error_console, use_json_logs

if TYPE_CHECKING:
    from compile_and_serve.runtime.messages import EngineInfo

logger = logging.getLogger(__name__)

SERVER_PANEL = "Server"


def serve_command(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER_PANEL)] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", rich_help_panel=SERVER_PANEL)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name that clients give in `model` (repeatable). By default the model argument.", rich_help_panel=SERVER_PANEL),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may call the server from a browser, or '*' for all (repeatable). By default none.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    max_body_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest request body; larger ones get HTTP 413.", rich_help_panel=SERVER_PANEL)
    ] = "4MiB",
    enable_prompt_tokens_details: Annotated[
        bool,
        typer.Option(
            "--enable-prompt-tokens-details",
            help="Report the number of cached prompt tokens in usage. It reveals whether others sent the same prefix.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    root_path: Annotated[str, typer.Option(help="Path prefix under which a proxy exposes the server.", rich_help_panel=SERVER_PANEL)] = "",
    chat_template: Annotated[
        str | None, typer.Option(help="A Jinja file or Jinja source that replaces the model's chat template.", rich_help_panel=SERVER_PANEL)
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="Format in which the model writes tool calls: hermes, llama3_json, mistral, qwen3_coder, deepseek_v3, pythonic, "
            "granite, phi4, or a parser of your own (an entry point's name, or module:Class). By default detected from the chat "
            "template.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="Refuse to start without a tool parser. With one, tool_choice 'auto' is always accepted.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Format in which the model writes its reasoning: deepseek_r1, qwen3, granite, gpt-oss, or a parser of your own. "
            "By default detected from the chat template.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    response_role: Annotated[str, typer.Option(help="Role of the generated messages.", rich_help_panel=SERVER_PANEL)] = "assistant",
    return_tokens_as_token_ids: Annotated[
        bool,
        typer.Option(
            "--return-tokens-as-token-ids",
            help="Write tokens in logprobs as token_id:N instead of their text.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    response_store: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for stored responses of /v1/responses, e.g. 256MiB. They are kept for --response-store-seconds. When newer "
            "ones need the room, the API key with the most loses its oldest. Only the API key that created a response can "
            "read it. By default none is stored.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    response_store_seconds: Annotated[
        float, typer.Option(help="Time after which a stored response is dropped.", rich_help_panel=SERVER_PANEL)
    ] = 86400.0,
    override_generation_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Sampling defaults that come before those of generation_config.json, e.g. '{\"temperature\": 0.5}'.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        typer.Option(
            "--enable-tokenizer-info-endpoint",
            help="Serve /tokenizer_info, with special tokens and chat templates.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = False,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish after SIGINT or SIGTERM.", rich_help_panel=SERVER_PANEL)
    ] = 30.0,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="Adapter to load at the start, which requests select by `model` (repeatable).",
            rich_help_panel=LORA_PANEL,
        ),
    ] = None,
    lora_dir: Annotated[
        Path | None,
        typer.Option(
            help="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters below this folder. Without "
            "--admin-api-key, anyone who may send requests may then load and unload.",
            rich_help_panel=LORA_PANEL,
        ),
    ] = None,
    enable_graphs: Annotated[
        bool,
        typer.Option(
            "--enable-graphs",
            help="Show the compilation at /graphs. The start then captures the model again instead of loading an artifact.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = False,
    *,
    server_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP: OpenAI's chat and completions API, metrics and health checks."""
    from compile_and_serve.runtime.child_process import freeze_heap
    from compile_and_serve.runtime.options import make_engine_config
    from compile_and_serve.runtime.parsers.registry import check_names
    from compile_and_serve.serve.server import run
    from compile_and_serve.serve.settings import ServerSettings

    if enable_graphs and engine_options["enforce_eager"]:
        raise ValueError("--enforce-eager compiles no graph for --enable-graphs to show: leave one of them out.")
    if (lora_modules or lora_dir) and not engine_options["enable_lora"]:
        raise ValueError("--lora-modules and --lora-dir need --enable-lora.")
    graphs = contextlib.ExitStack()
    if enable_graphs and engine_options["dump_dir"] is None:
        folder = graphs.enter_context(tempfile.TemporaryDirectory(prefix="compile-and-serve-graphs-"))
        engine_options = engine_options | {"dump_dir": folder}
    names = tuple(served_model_name or [model])
    settings = ServerSettings(
        served_model_names=names,
        host=host,
        port=port,
        allowed_origins=tuple(allowed_origins or ()),
        max_body_bytes=parse_size(max_body_size),
        prompt_tokens_details=enable_prompt_tokens_details,
        root_path=root_path,
        chat_template=chat_template,
        tool_call_parser=tool_call_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        reasoning_parser=reasoning_parser,
        response_role=response_role,
        return_tokens_as_token_ids=return_tokens_as_token_ids,
        response_store_bytes=0 if response_store is None else parse_size(response_store),
        response_store_seconds=response_store_seconds,
        override_sampling=parse_sampling_defaults(override_generation_config),
        tokenizer_info=enable_tokenizer_info_endpoint,
        shutdown_timeout=shutdown_timeout,
        lora_modules=tuple(map(_named_path, lora_modules or ())),
        lora_dir=lora_dir,
        graphs_dir=Path(engine_options["dump_dir"]) if enable_graphs else None,
        **server_options,
    )
    check_names(tool_call_parser, reasoning_parser)
    config = make_engine_config(model, **engine_options)
    started = time.perf_counter()
    if settings.log_format == "json":
        use_json_logs()
    with graphs, StageLog() if settings.log_format == "json" else StageDisplay() as stages:

        def on_ready(url: str, info: EngineInfo) -> None:
            stages.close()
            freeze_heap()
            seconds = time.perf_counter() - started
            ranks, replicas = config.num_ranks, config.parallel.data_parallel_size
            where = f"{replicas} replicas, each " if replicas > 1 else ""
            where += f"{ranks} × " if ranks > 1 else ""
            where += f"{info.device}, {info.dtype}, {info.num_kv_blocks * info.block_size} tokens of KV cache"
            if settings.log_format == "json":
                facts = {"url": url, "model": settings.served_model_names[0], "seconds": round(seconds, 1)}
                logger.info("Serving %s on %s", settings.served_model_names[0], url, extra=facts)
                return
            error_console().print(f"[bold]Serving {settings.served_model_names[0]} on {url}[/bold]  [dim]{where}[/dim]")
            pages = f"chat at {url}/, API page at {url}/docs; " if settings.uds is None else ""
            error_console().print(f"[dim]ready after {seconds:.1f} s; {pages}Ctrl-C stops[/dim]")
            if enable_graphs:
                how = " (the browser's password prompt takes the API key)" if settings.api_keys else ""
                error_console().print(f"[dim]compiled graphs: {url}/graphs{how}[/dim]")

        status = run(config, settings, on_stage=stages, on_ready=on_ready)
    if status:
        raise typer.Exit(status)


def _named_path(given: str) -> tuple[str, Path]:
    name, separator, path = given.partition("=")
    if not (name and separator and path):
        raise ValueError(f"--lora-modules takes NAME=PATH, got {given!r:.200}.")
    return name, Path(path).resolve()


def parse_sampling_defaults(given: str | None) -> dict[str, float | int]:
    """The value of --override-generation-config. Raises `ValueError` for anything but numbers under known names."""
    import json

    from compile_and_serve.runtime.text.load_tokenizer import GENERATION_DEFAULTS

    try:
        found = json.loads(given or "{}")
    except ValueError as error:
        raise ValueError(f"--override-generation-config must be a JSON object ({error}), got {given!r:.200}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"--override-generation-config must be a JSON object, got {given!r:.200}.")
    for name, value in found.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in GENERATION_DEFAULTS or not is_number:
            raise ValueError(
                f"--override-generation-config takes numbers for {', '.join(GENERATION_DEFAULTS)}, got {name!r:.50}: {value!r:.50}."
            )
    return found
