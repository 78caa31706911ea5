"""`compile-and-serve quantize`: write a quantized checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from compile_and_serve.serve.cli.flags import ModelArgument
from compile_and_serve.serve.cli.output import error_console


def quantize_command(
    model: ModelArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new or empty folder for the checkpoint.")],
    scheme: Annotated[
        Literal["int4", "fp8", "int8"], typer.Option(help="int4: weights only, in groups. fp8, int8: weights and activations.")
    ],
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="A text file to calibrate with (int4, int8); its last tenth is for the perplexity. By default Python's documentation."
        ),
    ] = None,
    num_samples: Annotated[int, typer.Option(min=1, help="Sequences of 512 tokens to calibrate with.")] = 128,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there is a CUDA device, else CPU.")] = "auto",
    num_threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. By default all cores.")] = None,
) -> None:
    """Quantize a model and write it as a checkpoint in the compressed-tensors format, with llm-compressor."""
    from compile_and_serve.runtime.quantize.flow import quantize_checkpoint

    console, started = error_console(), time.perf_counter()

    def show(stage: str) -> None:
        console.print(f"[dim]{time.perf_counter() - started:7.1f} s  {stage} …[/dim]")

    report = quantize_checkpoint(
        model, output, scheme, calibration=calibration, num_samples=num_samples, on_stage=show, device=device, num_threads=num_threads
    )
    change = (report.perplexity_after / report.perplexity_before - 1) * 100
    groups = f", groups of {report.group_size} inputs" if report.group_size else ""
    typer.echo(f"{output}: {scheme}{groups}")
    typer.echo(
        f"perplexity on {report.tokens} tokens: {report.perplexity_before:.3f} before, {report.perplexity_after:.3f} after "
        f"({change:+.1f} %)"
    )
    console.print(f"To use it: compile-and-serve serve {output}")
