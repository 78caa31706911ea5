"""`compile-and-serve inspect`: explore the compilation of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from compile_and_serve.serve.cli.output import error_console


def inspect_command(
    dump: Annotated[Path, typer.Argument(help="A folder written by --dump-dir.")],
    other: Annotated[Path | None, typer.Argument(help="A second dump to compare with the first.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Print tables instead of serving the explorer.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the explorer to one HTML file that needs no network.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.")] = 8001,
) -> None:
    """Explore a dumped compilation in the browser or the terminal, or compare two dumps."""
    from compile_and_serve.serve.inspect.data import load_dump

    report = load_dump(dump)
    if other is not None:
        if output is not None:
            raise ValueError("A comparison is printed in the terminal: leave --output out, or give one dump.")
        from compile_and_serve.serve.inspect.text import print_comparison

        print_comparison(report, load_dump(other), Console(highlight=False))
        return
    if text:
        from compile_and_serve.serve.inspect.text import print_dump

        print_dump(report, Console(highlight=False))
    if output is not None:
        from compile_and_serve.serve.inspect.page import build_page

        try:
            output.write_text(build_page(report), encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--output {output} cannot be written: {error}.") from None
        error_console().print(f"wrote {output} ({output.stat().st_size / 1024:.0f} KiB)")
    if not text and output is None:
        from compile_and_serve.serve.inspect.page import serve_page

        serve_page(
            report,
            host=host,
            port=port,
            on_ready=lambda url: error_console().print(f"[bold]Explorer on {url}[/bold]  [dim]Ctrl-C stops[/dim]"),
        )
