"""The process that checks grammars for `GrammarChecker`. A grammar that is too deep overflows the library's stack, and one that is
too large takes too long: either ends this process instead of the server.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable

import msgspec

from compile_and_serve.runtime.child_process import frame, read_bootstrap, read_frame
from compile_and_serve.runtime.structured.grammar import first_masks, to_grammar
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

MAX_MEMORY = 1 << 30  # bytes that a check may allocate
COMPILE_STACK, MASK_STACK = 16 << 20, 1 << 20  # bytes; the engine's are larger


class CheckRequest(msgspec.Struct):
    """params: without `compiled`. special: text of special tokens → id."""

    params: StructuredOutputsParams
    special: dict[str, int]


class CheckAnswer(msgspec.Struct):
    """The grammar, or what is wrong and where (`GrammarError`)."""

    grammar: str = ""
    error: str | None = None
    path: str = "$"


def answer(request: CheckRequest) -> CheckAnswer:
    """Check one grammar on stacks smaller than the engine's."""
    found = CheckAnswer(error="The grammar needs too much memory")

    def compile_it() -> None:
        nonlocal found
        try:
            found = CheckAnswer(grammar=to_grammar(request.params, request.special))
        except GrammarError as error:
            found = CheckAnswer(error=error.reason, path=error.path)

    _on_stack(COMPILE_STACK, compile_it)
    if found.error is None:
        _on_stack(MASK_STACK, lambda: first_masks(found.grammar))
    return found


def _on_stack(size: int, work: Callable[[], None]) -> None:
    threading.stack_size(size)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def main() -> None:
    """Answer requests until stdin ends."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    read_bootstrap()
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (content := read_frame(stdin)) is not None:
        found = answer(msgspec.msgpack.decode(content, type=CheckRequest))
        stdout.writelines(frame(msgspec.msgpack.encode(found)))
        stdout.flush()
