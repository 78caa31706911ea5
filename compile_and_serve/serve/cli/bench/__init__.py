"""`compile-and-serve bench latency | throughput | serve`: prints a table on stderr and one JSON line on stdout."""

from __future__ import annotations

import typer

from compile_and_serve.serve.cli.bench.offline import latency_command, throughput_command
from compile_and_serve.serve.cli.bench.online import serve_bench_command
from compile_and_serve.serve.cli.flags import command

bench_app = typer.Typer(no_args_is_help=True, help="Measure latency, throughput or a running server.")
bench_app.command("latency")(command(latency_command))
bench_app.command("throughput")(command(throughput_command))
bench_app.command("serve")(command(serve_bench_command))
