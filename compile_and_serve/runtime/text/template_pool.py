"""Renders chat templates in processes with a deadline and a memory limit (`template_worker`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from compile_and_serve.runtime.child_process import AnsweringProcess, boot_code, frame
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.template_worker import RenderAnswer, RenderRequest
from compile_and_serve.runtime.text.tokenizer import Tokenizer

MAX_PROCESSES = 4
# The template must not see the server's secrets.
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
_BOOT = boot_code("compile_and_serve.runtime.text.template_worker")


class TemplatePool:
    """Up to `MAX_PROCESSES` processes, which are started when they are needed.

    seconds: deadline for one conversation; includes the start of a process. executor: threads for calls of `render`, as
    many as processes.
    """

    def __init__(self, *, seconds: float = 10.0) -> None:
        self.seconds = seconds
        self.executor = ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="chat-template")
        self._idle: list[AnsweringProcess] = []
        self._busy: set[AnsweringProcess] = set()
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(MAX_PROCESSES)
        self._is_closed = False

    def check(self, template: str) -> None:
        """Raise `ChatTemplateError` if the template is not valid Jinja."""
        self._ask(RenderRequest(self._cpu_seconds, template))

    def render(self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, template: str | None = None, **options: Any) -> str:
        """`compile_and_serve.runtime.text.chat_template.render_chat` in another process. Blocks the calling thread.

        Raises `ChatTemplateError`, also if the template exceeds its time or memory.
        """
        templates = tokenizer.chat_templates if template is None else {}
        request = RenderRequest(self._cpu_seconds, template, templates, tokenizer.special_tokens, messages, options)
        return self._ask(request)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            for process in self._busy:  # the thread that waits for it then closes it
                process.kill()
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()
        self.executor.shutdown(wait=False, cancel_futures=True)

    @property
    def _cpu_seconds(self) -> int:
        return int(self.seconds) + 1

    def _ask(self, request: RenderRequest) -> str:
        try:
            parts = list(frame(msgspec.msgpack.encode(request)))
        except (ValueError, OverflowError, TypeError, RecursionError) as error:
            raise ChatTemplateError(f"The messages cannot be rendered: {error}.") from error
        with self._slots:
            process = self._take()
            is_usable = False
            try:
                answer = msgspec.msgpack.decode(process.ask(parts, self.seconds), type=RenderAnswer)
                is_usable = True
            except TimeoutError:
                raise ChatTemplateError(f"The chat template did not finish these messages within {self.seconds:g} seconds.") from None
            except OSError:
                raise ChatTemplateError("The chat template's process ended, probably for lack of memory.") from None
            finally:
                self._give_back(process, is_usable)
        if answer.error is not None:
            raise ChatTemplateError(answer.error)
        return answer.text

    def _take(self) -> AnsweringProcess:
        with self._lock:
            process = self._idle.pop() if self._idle else AnsweringProcess(_BOOT, environment=_environment())
            self._busy.add(process)
            return process

    def _give_back(self, process: AnsweringProcess, is_usable: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            if is_usable and not self._is_closed:
                self._idle.append(process)
                return
        process.close()


def _environment() -> dict[str, str]:
    return {name: value for name in _ENVIRONMENT if (value := os.environ.get(name)) is not None}
