"""A command's messages on stderr: finished start-up stages, log lines, and one sentence for an error."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TextIO

import typer
from rich.console import Console
from rich.markup import escape

from compile_and_serve.runtime.logs import JsonHandler, current_format

logger = logging.getLogger(__name__)

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130

_OUR_LOGGERS = ("benchmarks", "compile_and_serve")
# A record may quote a client's text, in which control characters would change what the terminal shows.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _Console(Console):
    """A console that goes silent when its output pipe is closed. rich would raise in the code that prints."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


@cache
def _console_on(stream: TextIO) -> Console:
    return _Console(file=stream, highlight=False, soft_wrap=True)


def error_console() -> Console:
    """The console for messages on stderr. All messages share it, so that no line breaks into the spinner."""
    return _console_on(sys.stderr)


class _ConsoleHandler(logging.Handler):
    """Prints log records as lines: warnings and errors with their level, others dimmed."""

    def emit(self, record: logging.LogRecord) -> None:
        text = escape(self.format(record).translate(_CONTROL))
        if record.levelno >= logging.ERROR:
            text = f"[red]{record.levelname.capitalize()}:[/red] {text}"
        elif record.levelno >= logging.WARNING:
            text = f"[yellow]{record.levelname.capitalize()}:[/yellow] {text}"
        else:
            text = f"[dim]· {text}[/dim]"
        try:
            error_console().print(text)
        except Exception:  # for example, a full disk
            self.handleError(record)


class StageDisplay:
    """Prints one line per finished start-up stage. Call it with (stage, seconds, detail).

    On a terminal, a spinner runs until the next line. Use it as a context manager, or call `close()`.
    """

    def __init__(self) -> None:
        self._console = error_console()
        self._started = time.perf_counter()
        self._status = self._console.status("starting …") if self._console.is_terminal else None

    def __enter__(self) -> StageDisplay:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, stage: str, seconds: float, detail: str = "") -> None:
        line = f"[green]✓[/green] {escape(stage):<14} {seconds:7.2f} s"
        self._console.print(f"{line}  [dim]{escape(detail)}[/dim]" if detail else line)
        if self._status is not None:
            elapsed = time.perf_counter() - self._started
            self._status.update(f"{elapsed:.0f} s so far, last stage: {escape(stage)} …")

    def close(self) -> None:
        """Stop the spinner."""
        if self._status is not None:
            self._status.stop()


class StageLog:
    """`StageDisplay` as log records."""

    def __enter__(self) -> StageLog:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __call__(self, stage: str, seconds: float, detail: str = "") -> None:
        logger.info("Stage %s", stage, extra={"stage": stage, "seconds": round(seconds, 2), "detail": detail})

    def close(self) -> None:
        """There is nothing to stop."""


def use_json_logs() -> None:
    """Log JSON objects instead of text from now on."""
    logging.basicConfig(level=logging.getLogger().level, handlers=[JsonHandler()], force=True)


def set_up_logging(*, verbose: bool) -> None:
    """Log on stderr: our own loggers at INFO (DEBUG with --verbose), all others at WARNING."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_ConsoleHandler()], force=True)
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if verbose else logging.INFO)


def run_command(function: Callable[[], None], *, verbose: bool) -> None:
    """Run a command. A user's mistake (`ValueError`) exits with status 2, another error with 1; both print one sentence.

    verbose: print the traceback too.
    """
    set_up_logging(verbose=verbose)
    try:
        function()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        user_error = isinstance(error, ValueError)
        if current_format() == "json":
            logger.error("%s", error, exc_info=None if user_error else error)
            raise typer.Exit(USER_ERROR if user_error else FAILURE) from None
        console = error_console()
        if verbose:
            console.print_exception()
        message = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        hint = "" if user_error or verbose else " (--verbose shows the traceback)"
        kind = "" if user_error else f"{type(error).__name__}: "
        console.print(f"[red]Error:[/red] {escape(kind + message.strip() + hint)}")
        raise typer.Exit(USER_ERROR if user_error else FAILURE) from None
