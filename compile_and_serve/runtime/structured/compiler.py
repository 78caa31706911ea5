"""`GrammarCompiler`: compiles checked grammars for the engine in threads, so that no step waits for one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import llguidance

from compile_and_serve.runtime.structured.distinct_items import DistinctGrammar, TokenTexts
from compile_and_serve.runtime.structured.grammar import limits, split, why_unsatisfiable

logger = logging.getLogger(__name__)

MAX_CACHED = 64  # grammars that no request uses
MAX_THREADS = 2
# The grammar was checked on smaller stacks (`check_worker`).
_STACK_BYTES = 64 << 20


class CompiledGrammar(NamedTuple):
    """matcher: at the beginning; must be copied. distinct: the arrays whose items must differ."""

    matcher: llguidance.LLMatcher
    distinct: DistinctGrammar | None


Grammar = Future[CompiledGrammar]


class GrammarJobs:
    """Grammars to compile, one of each API key in turn: a key with many delays the grammar of another by no more than one compilation."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[tuple[str, Grammar]]] = OrderedDict()  # by key; the next one first
        self._arrived = threading.Condition()

    def put(self, tenant: str, job: tuple[str, Grammar]) -> None:
        """Add a job of a key."""
        with self._arrived:
            self._waiting.setdefault(tenant, deque()).append(job)
            self._arrived.notify()

    def get(self) -> tuple[str, Grammar]:
        """Take the next job; waits for one."""
        with self._arrived:
            while not self._waiting:
                self._arrived.wait()
            tenant, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            if jobs:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            return job


class Vocabulary(Protocol):
    """What a tokenizer must know: its tokens, as `tokenizers` describes them in JSON, and the ids that end a sequence."""

    eos_token_ids: list[int]
    vocab_size: int

    def to_json(self) -> str: ...


class GrammarCompiler:
    """Compiled grammars by their text. The library does not hold Python's lock while it compiles.

    load: loads the model's vocabulary; called once, at the first grammar, since that takes up to a second. vocab_size: of the model.
    """

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._texts: TokenTexts | None = None
        self._grammars: weakref.WeakValueDictionary[str, Grammar] = weakref.WeakValueDictionary()  # all that are alive
        self._recent: OrderedDict[str, Grammar] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._jobs = GrammarJobs()
        self._num_threads = self._num_queued = 0

    def compile(self, grammar: str, tenant: str = "") -> Grammar:
        """The compiled grammar. The result may raise `ValueError`. tenant: the API key whose request it is, which gets its turn.

        A grammar stays compiled as long as the caller keeps the result.
        """
        with self._lock:
            found = self._grammars.get(grammar)
            future = Future() if found is None else found
            self._recent[grammar] = self._grammars[grammar] = future
            self._recent.move_to_end(grammar)
            if len(self._recent) > MAX_CACHED:
                self._recent.popitem(last=False)
            if found is not None:
                return found
            self._num_queued += 1
            if self._num_threads < min(MAX_THREADS, self._num_queued):
                self._num_threads += 1
                self._start_thread()
        self._jobs.put(tenant, (grammar, future))
        return future

    @property
    def num_words(self) -> int:
        """Words of a mask, 32 tokens each. Known once a grammar is compiled."""
        assert self._tokenizer is not None
        return -(-self._tokenizer.vocab_size // 32)

    def _start_thread(self) -> None:
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=self._run, name="grammars", daemon=True).start()
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while True:
            grammar, future = self._jobs.get()
            try:
                future.set_result(self._compile(grammar))
            except Exception as error:
                if not isinstance(error, ValueError):
                    logger.exception("A grammar could not be compiled.")
                future.set_exception(error)
                with self._lock:
                    self._recent.pop(grammar, None)
                    self._grammars.pop(grammar, None)
            with self._lock:
                self._num_queued -= 1

    def _compile(self, grammar: str) -> CompiledGrammar:
        grammar, rules = split(grammar)
        with self._loading:
            if self._tokenizer is None:
                vocabulary = self._load()
                self._tokenizer = llguidance.LLTokenizer(
                    vocabulary.to_json(), n_vocab=max(self._vocab_size, vocabulary.vocab_size), eos_token=vocabulary.eos_token_ids
                )
            if rules and self._texts is None:
                self._texts = TokenTexts.of(self._tokenizer)
            texts = self._texts
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        error = matcher.get_error() or why_unsatisfiable(matcher)
        if error:
            raise ValueError(f"The structured output's grammar is not supported: {error.splitlines()[0][:300]}.")
        return CompiledGrammar(matcher, DistinctGrammar.create(rules, texts) if rules and texts is not None else None)
