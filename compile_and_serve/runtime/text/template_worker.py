"""The process that renders chat templates for `template_pool`. It reads requests from stdin and writes answers to stdout.

A checkpoint's template is a program of unknown origin. Jinja's sandbox limits what it can access, but not its time and memory.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from compile_and_serve.runtime.child_process import frame, read_bootstrap, read_frame
from compile_and_serve.runtime.text.chat_template import ChatTemplateError, check_template, render_chat

MAX_MEMORY = 512 * 1024 * 1024  # bytes that rendering may allocate
MAX_TEXT = 16 * 1024 * 1024  # characters of a rendered conversation


class RenderRequest(msgspec.Struct):
    """A conversation to render, or without messages a template to check.

    chat_templates, special_tokens: those of the tokenizer. options: further arguments of `render_chat`.
    """

    cpu_seconds: int
    template: str | None
    chat_templates: Mapping[str, str] = {}
    special_tokens: Mapping[str, str] = {}
    messages: Sequence[Any] | None = None
    options: dict[str, Any] = {}


class RenderAnswer(msgspec.Struct):
    """The rendered text, or the sentence of a `ChatTemplateError`."""

    text: str = ""
    error: str | None = None


def answer(request: RenderRequest) -> RenderAnswer:
    """Check or render."""
    try:
        if request.messages is None:
            check_template(request.template or "")
            return RenderAnswer()
        text = render_chat(request, request.messages, template=request.template, **request.options)
        if len(text) > MAX_TEXT:
            raise ChatTemplateError(f"The rendered conversation has more than {MAX_TEXT} characters.")
        return RenderAnswer(text=text)
    except ChatTemplateError as error:
        return RenderAnswer(error=str(error))
    except MemoryError:
        return RenderAnswer(error="The chat template needs too much memory for these messages.")
    except RecursionError:
        return RenderAnswer(error="The chat template is nested too deeply.")


def main() -> None:
    """Answer requests until stdin ends."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    read_bootstrap()
    resource.setrlimit(resource.RLIMIT_AS, (_virtual_memory() + MAX_MEMORY,) * 2)
    while (content := read_frame(stdin)) is not None:
        request = msgspec.msgpack.decode(content, type=RenderRequest)
        # The parent ends this process at its deadline. This limit is for a parent that is gone.
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + request.cpu_seconds + 1, hard))
        stdout.writelines(frame(_encoded(answer(request))))
        stdout.flush()


def _encoded(rendered: RenderAnswer) -> bytes:
    try:
        return msgspec.msgpack.encode(rendered)
    except UnicodeEncodeError:  # an escape in the arguments of a tool call can make one
        return msgspec.msgpack.encode(RenderAnswer(error="The rendered conversation contains a lone surrogate."))


def _virtual_memory() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()
