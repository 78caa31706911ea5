"""Entry point of the console script `compile-and-serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from compile_and_serve import __version__
from compile_and_serve.runtime.distributed.bytecode import keep_bytecode
from compile_and_serve.serve.cli.bench import bench_app
from compile_and_serve.serve.cli.cache_command import cache_app
from compile_and_serve.serve.cli.compile_command import compile_model_command
from compile_and_serve.serve.cli.flags import command
from compile_and_serve.serve.cli.generate_command import generate_command
from compile_and_serve.serve.cli.inspect_command import inspect_command
from compile_and_serve.serve.cli.models_command import models_command
from compile_and_serve.serve.cli.quantize_command import quantize_command
from compile_and_serve.serve.cli.route_command import route_command
from compile_and_serve.serve.cli.serve_command import serve_command
from compile_and_serve.serve.cli.vllm.command import VllmCommand

app = typer.Typer(
    name="compile-and-serve",
    help="Compile an LLM once, then serve it over an OpenAI-compatible API.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version_wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command("serve", cls=VllmCommand)(command(serve_command))
app.command("compile")(command(compile_model_command))
app.command("generate")(command(generate_command))
app.command("inspect")(command(inspect_command))
app.command("models")(command(models_command))
app.command("route")(command(route_command))
app.command("quantize")(command(quantize_command))
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")


def main() -> None:
    """Run the command line."""
    keep_bytecode()
    app()
