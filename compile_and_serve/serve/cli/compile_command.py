"""`compile-and-serve compile`: build a model's artifact ahead of time. Needs no weights."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from compile_and_serve.serve.cli.flags import COMPILER_PANEL, ModelArgument
from compile_and_serve.serve.cli.output import StageDisplay, error_console


def compile_model_command(
    model: ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the artifact to this folder, for `--artifact`. By default it goes to the user's cache.",
            rich_help_panel=COMPILER_PANEL,
        ),
    ] = None,
    *,
    engine_options: dict[str, Any],
) -> None:
    """Compile a model without loading its weights, so that later starts skip the compilation."""
    if engine_options["enforce_eager"]:
        raise ValueError("--enforce-eager runs the model uncompiled, so there is nothing to compile: leave it out.")
    if not engine_options["use_cache"]:
        raise ValueError("--no-cache would discard the compiled model: leave it out.")
    if output is not None and engine_options["cache_dir"] is not None:
        raise ValueError("--output and --cache-dir both name the artifact's folder: give one of them.")
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is not a folder: give a new folder, or one that holds artifacts.")
    from compile_and_serve.custom_ops.mesh import ORIGIN
    from compile_and_serve.custom_ops.platform import platform_of, resolve_device
    from compile_and_serve.models.registry import build_model
    from compile_and_serve.runtime.options import make_engine_config
    from compile_and_serve.runtime.runner.attention_backends import backends_of_model, keep_built_modules
    from compile_and_serve.runtime.runner.compile_drafter import build_drafter, compile_drafter
    from compile_and_serve.runtime.runner.compile_models import SideModelCompiler, compile_spec
    from compile_and_serve.runtime.runner.device import model_dtype, use_threads, with_cache_dtype
    from compile_and_serve.runtime.runner.stages import check_stages
    from compile_and_serve.runtime.weights import read_model_config

    config = make_engine_config(model, **(engine_options | ({} if output is None else {"cache_dir": output})))
    started = time.perf_counter()
    with StageDisplay() as stages:
        device = resolve_device(config.device)
        dtype = model_dtype(config, device)
        use_threads(config.num_threads, config.num_processes)
        model_config = read_model_config(config.model)
        config = with_cache_dtype(config, model_config, device)
        spec = build_model(
            model_config,
            dtype=dtype,
            model_impl=config.model.model_impl,
            requantize=config.compile.quantization is not None,
            code_folder=config.model.code_folder,
        )
        drafter = build_drafter(config, spec, dtype)
        spec = spec if drafter is None else drafter.target
        detail = f"{spec.config['architectures'][0]}, {str(dtype).removeprefix('torch.')} on {platform_of(device).name}"
        stages("read", time.perf_counter() - started, detail)
        check_stages(spec, config.mesh)
        backends = backends_of_model(spec, config, device, dtype)
        compiled = compile_spec(spec, config, backends, device=device, dtype=dtype, on_stage=stages)
        beside = SideModelCompiler(config=config, device=device, dtype=dtype, on_stage=stages, coordinates=ORIGIN)
        if drafter is not None:
            compiled_drafter = compile_drafter(beside, drafter)
        if spec.encoder is not None:
            beside.compile(spec.encoder, "encoder", config.model.path)
        if output is not None:
            start = time.perf_counter()
            count = keep_built_modules(backends, spec, device, dtype, output)
            if drafter is not None:
                count += keep_built_modules(compiled_drafter.backends, drafter.spec, device, dtype, output)
            if count:
                stages("attention", time.perf_counter() - start, f"{count} kernel modules stored")
    _print_report(compiled.report, time.perf_counter() - started, output)
    if drafter is not None:
        of_drafter = compiled_drafter.model.report
        error_console().print(f"Drafter: {of_drafter['pieces']} pieces, {of_drafter['distinct_pieces']} distinct")


def _print_report(report: dict[str, Any], seconds: float, output: Path | None) -> None:
    from compile_and_serve.serve.inspect.text import pass_tables, profile_tables

    console = error_console()
    for table in (*pass_tables(report["passes"]), *profile_tables(report.get("profile"))):
        console.print(table)
    verb = "loaded from the artifact" if report["artifact"] == "hit" else "compiled"
    console.print(f"{report['pieces']} pieces, {report['distinct_pieces']} distinct, {verb} in {seconds:.1f} s")
    if output is not None:
        console.print(f"To use it: compile-and-serve serve … --artifact {output}")
