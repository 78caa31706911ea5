"""`GrammarChecker`: checks grammars in processes with a deadline and a memory limit."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache

import msgspec

from compile_and_serve.runtime.child_process import AnsweringProcess, boot_code, describe_exit, frame
from compile_and_serve.runtime.structured.check_worker import CheckAnswer, CheckRequest
from compile_and_serve.runtime.structured.grammar import MAX_BYTES, check_kind
from compile_and_serve.runtime.structured.grammar_error import GrammarError
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_PROCESSES = 2
SECONDS = 2.0  # for one grammar, as long as the machine's cores are free
_START_SECONDS = 20.0
_CACHED_BYTES = 32 << 20
_BOOT = boot_code("compile_and_serve.runtime.structured.check_worker")


class GrammarChecker:
    """Turns `StructuredOutputsParams` into checked grammars. May be called from several threads.

    The processes are started when they are needed. Results are cached by content.
    """

    def __init__(self, *, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._idle: list[AnsweringProcess] = []
        self._slots = threading.Semaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, CheckAnswer] = OrderedDict()
        self._cached_bytes = 0

    def check(self, params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
        """The grammar. Raises `GrammarError`, also for a grammar that exceeds time or memory. Blocks the calling thread."""
        check_kind(params)
        request = _encode(params, special)
        key = hashlib.sha256(request).digest()
        answer = self._cached(key)
        if answer is None:
            answer = self._ask(request)
            self._remember(key, answer)
        if answer.error is not None:
            raise GrammarError(answer.error, answer.path)
        return answer.grammar

    def knows(self, params: StructuredOutputsParams, special: Mapping[str, int]) -> bool:
        """Whether `check` would answer at once."""
        try:
            check_kind(params)
            return self._cached(hashlib.sha256(_encode(params, special)).digest()) is not None
        except GrammarError:
            return True

    def refuses(self, params: StructuredOutputsParams, special: Mapping[str, int]) -> bool:
        """Whether `check` raises."""
        try:
            self.check(params, special)
        except GrammarError:
            return True
        return False

    def check_ahead(self, params: StructuredOutputsParams, special: Mapping[str, int]) -> None:
        """Let a later `check` answer at once."""
        with contextlib.suppress(GrammarError):
            self.check(params, special)

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().close()

    def _cached(self, key: bytes) -> CheckAnswer | None:
        with self._lock:
            answer = self._cache.get(key)
            if answer is not None:
                self._cache.move_to_end(key)
            return answer

    def _remember(self, key: bytes, answer: CheckAnswer) -> None:
        with self._lock:
            if key not in self._cache:
                self._cache[key] = answer
                self._cached_bytes += len(answer.grammar) + 256
            while self._cached_bytes > _CACHED_BYTES:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1].grammar) + 256

    def _ask(self, request: bytes) -> CheckAnswer:
        with self._slots:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or AnsweringProcess(_BOOT)
            seconds = self.seconds + (0.0 if process.has_started else _START_SECONDS)
            try:
                answer = msgspec.msgpack.decode(process.ask(list(frame(request)), seconds), type=CheckAnswer)
            except OSError:
                logger.warning("A grammar is refused: the process that checked it %s.", describe_exit(process.close()))
                return CheckAnswer(error="The grammar is too complex: it exceeds the limits on time, memory or depth")
            with self._lock:
                self._idle.append(process)
            return answer


def _encode(params: StructuredOutputsParams, special: Mapping[str, int]) -> bytes:
    # The grammar does not depend on these.
    params = msgspec.structs.replace(params, begins_after=[], thinking_token_budget=None, thinking_starts=[], may_end_before=False)
    try:
        request = msgspec.msgpack.encode(CheckRequest(params, dict(special) if params.structural_tag is not None else {}))
    except RecursionError:
        raise GrammarError("It is nested too deeply") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise GrammarError(f"It cannot be encoded as JSON: {error}") from None
    if len(request) > 4 * MAX_BYTES:
        raise GrammarError(f"It may have at most {MAX_BYTES} characters")
    return request


@cache
def grammar_checker() -> GrammarChecker:
    """This process's checker."""
    return GrammarChecker()
