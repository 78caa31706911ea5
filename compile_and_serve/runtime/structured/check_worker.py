"""The process that checks grammars for `GrammarChecker`. A grammar that is too deep overflows the library's stack, and one that is
too large takes too long: either ends this process instead of the server.
"""

from __future__ import annotations

import os
import resource
import struct
import sys
import threading
from typing import BinaryIO

import msgspec

from compile_and_serve.runtime.structured.grammar import first_masks, to_grammar
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

MAX_MEMORY = 1 << 30  # bytes that a check may allocate
COMPILE_STACK, MASK_STACK = 16 << 20, 1 << 20  # bytes; the engine's are larger
_LENGTH = struct.Struct("<Q")


class CheckRequest(msgspec.Struct):
    """params: without `compiled`. special: text of special tokens → id."""

    params: StructuredOutputsParams
    special: dict[str, int]


class CheckAnswer(msgspec.Struct):
    """The grammar, or what is wrong and where (`GrammarError`)."""

    grammar: str = ""
    error: str | None = None
    path: str = "$"


def write_frame(stream: BinaryIO, content: bytes) -> None:
    """Write the length of an encoded message, and the message."""
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


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


def _on_stack(size: int, work: object) -> None:
    threading.stack_size(size)
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def main() -> None:
    """Answer requests until stdin ends."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (content := read_frame(stdin)) is not None:
        found = answer(msgspec.msgpack.decode(content, type=CheckRequest))
        write_frame(stdout, msgspec.msgpack.encode(found))
