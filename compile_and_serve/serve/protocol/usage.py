"""Token counts of a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from compile_and_serve.runtime.text.output_processor import CompletionDelta, CompletionOutput
from compile_and_serve.serve.ledger.book import LedgerBook
from compile_and_serve.serve.ledger.record import RequestRecord, current_record


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request. cached_tokens: prompt tokens that were found in the prefix cache. loaded_tokens: those among them
    that were loaded for the request, by tier.

    with_details: whether clients see cached_tokens. n: completions of each prompt. reasoning_tokens: None if the answer has no reasoning.
    draft_tokens, accepted_tokens: of speculative decoding.
    record: of the request, if it asked for its ledger. book: of the server.
    """

    prompt_tokens: int
    with_details: bool
    n: int = 1
    completion_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    reasoning_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    record: RequestRecord | None = None
    book: LedgerBook | None = None

    def add(self, output: CompletionDelta | CompletionOutput) -> None:
        """Count the tokens of a completion, or of a delta."""
        self.completion_tokens += len(output.token_ids)
        self.draft_tokens += output.num_draft_tokens
        self.accepted_tokens += output.num_accepted_drafts
        # The n completions of a prompt share it, so its cached tokens are counted once, like its tokens.
        if output.index % self.n == 0:
            self.cached_tokens += output.num_cached_tokens
            self.loaded_tokens.update(output.num_loaded_tokens)

    @property
    def shown_cached_tokens(self) -> int:
        """cached_tokens for APIs where the field is a number; 0 without details."""
        return self.cached_tokens if self.with_details else 0

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's `usage` object."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": self._prompt_details() if self.with_details else None,
        }
        details: dict[str, int] = {}
        if self.reasoning_tokens is not None:
            details["reasoning_tokens"] = self.reasoning_tokens
        if self.draft_tokens:
            details["accepted_prediction_tokens"] = self.accepted_tokens
            details["rejected_prediction_tokens"] = self.draft_tokens - self.accepted_tokens
        if details:
            usage["completion_tokens_details"] = details
        if self.record is not None and self.book is not None and self.record.is_answered:
            usage["ledger"] = self.book.summary(self.record, with_prefix=self.with_details)
        return usage

    def ask_ledger(self, book: LedgerBook) -> None:
        """Add the ledger of the request whose handler runs, once its sequences have ended."""
        self.record, self.book = current_record.get(), book

    def _prompt_details(self) -> dict[str, Any]:
        details: dict[str, Any] = {"cached_tokens": self.cached_tokens}
        if self.loaded_tokens:
            device = self.cached_tokens - self.loaded_tokens.total()
            details["cached_tokens_details"] = {"device": device, **self.loaded_tokens}
        return details
