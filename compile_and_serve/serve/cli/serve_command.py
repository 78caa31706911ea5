"""`compile-and-serve serve`: run the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compile_and_serve.option_fields import make_config
from compile_and_serve.serve.cli.api_keys import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, read_api_keys, with_tenants
from compile_and_serve.serve.cli.config_file import apply_config_file
from compile_and_serve.serve.cli.flags import ACCESS_PANEL, CONNECTION_PANEL, ModelArgument
from compile_and_serve.serve.cli.output import StageDisplay, StageLog, error_console, use_json_logs
from compile_and_serve.serve.cli.vllm.command import check_flags, sentences_about_flags
from compile_and_serve.serve.settings import ServerSettings

if TYPE_CHECKING:
    from compile_and_serve.runtime.config import EngineConfig
    from compile_and_serve.runtime.messages import EngineInfo

logger = logging.getLogger(__name__)


def serve_command(
    model: ModelArgument,
    *,
    server_options: dict[str, Any],
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML file that maps flags to values, like 'max-num-seqs: 64'; 'model' may be in it too. Flags of the command line win.",
            callback=apply_config_file,
            is_eager=True,
            rich_help_panel=CONNECTION_PANEL,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this bearer token (repeatable). /graphs also accepts it as a password. The server hides the key from "
            f"`ps`, but your shell's history keeps it: prefer --api-key-file or the environment variable {API_KEY_VARIABLE} "
            "(several keys separated by commas). With several keys, requests share cached prefixes only with requests of the "
            "same key.",
            rich_help_panel=ACCESS_PANEL,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with API keys, one per line.", rich_help_panel=ACCESS_PANEL)] = None,
    admin_api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Require this bearer token for admin and LoRA routes, which API keys then do not open (repeatable). It opens "
            f"everything else too. Also from the environment variable {ADMIN_KEY_VARIABLE}.",
            rich_help_panel=ACCESS_PANEL,
        ),
    ] = None,
    admin_api_key_file: Annotated[
        Path | None, typer.Option(help="File with admin keys, one per line.", rich_help_panel=ACCESS_PANEL)
    ] = None,
    connection_options: dict[str, Any],
    engine_options: dict[str, Any],
) -> None:
    """Serve a model over HTTP: OpenAI's chat and completions API, metrics and health checks."""
    check_flags()
    from compile_and_serve.runtime.child_process import freeze_heap
    from compile_and_serve.runtime.options import make_engine_config
    from compile_and_serve.runtime.parsers.registry import check_names
    from compile_and_serve.serve.server import run

    enable_graphs = server_options["graphs_dir"]
    if enable_graphs and engine_options["enforce_eager"]:
        raise ValueError("--enforce-eager compiles no graph for --enable-graphs to show: leave one of them out.")
    if (server_options["lora_modules"] or server_options["lora_dir"]) and not engine_options["enable_lora"]:
        raise ValueError("--lora-modules and --lora-dir need --enable-lora.")
    graphs = contextlib.ExitStack()
    if enable_graphs and engine_options["dump_dir"] is None:
        folder = graphs.enter_context(tempfile.TemporaryDirectory(prefix="compile-and-serve-graphs-"))
        engine_options = engine_options | {"dump_dir": folder}
    options = server_options | connection_options
    options |= {
        "served_model_names": options.get("served_model_names", (model,)),
        "graphs_dir": engine_options["dump_dir"] if enable_graphs else None,
        "api_keys": with_tenants(read_api_keys(api_key, api_key_file), options.get("tenants", ())),
        "admin_keys": read_api_keys(admin_api_key, admin_api_key_file, flag="--admin-api-key", variable=ADMIN_KEY_VARIABLE),
    }
    settings = make_config(ServerSettings, options)
    if settings.tls is not None:
        if settings.tls.require_client_certificate and settings.tls.ca_certs is None:
            raise ValueError("--ssl-require-client-cert needs --ssl-ca-certs.")
        settings.tls.context()  # raises now, not after the model has loaded
    check_names(settings.tool_call_parser, settings.reasoning_parser)
    engine_config = make_engine_config(model, **engine_options)
    started = time.perf_counter()
    if settings.log_format == "json":
        use_json_logs()
    for sentence in sentences_about_flags():
        logger.warning("%s", sentence)
    if settings.headless or engine_config.parallel.host_rank:
        _run_host(engine_config, settings)
        return
    with graphs, StageLog() if settings.log_format == "json" else StageDisplay() as stages:

        def on_all_ready(urls: list[str]) -> None:
            stages.close()
            logger.info("Serving %s on %s", settings.served_model_names[0], ", ".join(urls))

        def on_ready(url: str, info: EngineInfo) -> None:
            stages.close()
            freeze_heap()
            seconds = time.perf_counter() - started
            ranks, replicas = engine_config.mesh.size, engine_config.parallel.data_parallel_size
            where = f"{replicas} replicas, each " if replicas > 1 else ""
            where += f"{ranks} × " if ranks > 1 else ""
            tokens = info.num_kv_blocks * info.block_size
            where += f"{info.device}, {info.dtype}, " + (f"{tokens} tokens of KV cache" if tokens else "no KV cache")
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

        if settings.has_supervisor:
            from compile_and_serve.serve.supervisor.supervisor import supervise

            status = supervise(engine_config, settings, on_stage=stages, on_ready=on_all_ready)
        else:
            status = run(engine_config, settings, on_stage=stages, on_ready=on_ready)
    if status:
        raise typer.Exit(status)


def _run_host(engine_config: EngineConfig, settings: ServerSettings) -> None:
    """Run the ranks of a host that has no server."""
    rank, size = engine_config.parallel.host_rank, engine_config.parallel.num_hosts
    if not settings.headless:
        raise ValueError(f"The server runs on the host with --node-rank 0, and this is host {rank} of {size}: give it --headless.")
    if not rank:
        raise ValueError("--headless is for hosts that are not --node-rank 0, on which the server runs: give --nnodes and --node-rank.")
    from compile_and_serve.runtime.distributed.host_agent import run_host

    logging.getLogger("compile_and_serve").setLevel(min(logging.INFO, logging.getLogger("compile_and_serve").getEffectiveLevel()))
    if status := run_host(engine_config):
        raise typer.Exit(status)
