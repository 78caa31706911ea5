"""`GrammarError`: a wrong or unsupported form of structured output."""

from __future__ import annotations

GRAMMAR_FAILED = "The structured output's grammar could not be followed"  # begins the error of a request whose masks fail


class GrammarError(ValueError):
    """path: where in the field's value the fault lies, e.g. "$.properties.name"; "$" is the whole value. reason: without a full stop."""

    def __init__(self, reason: str, path: str = "$") -> None:
        super().__init__(f"{reason} (at {path})")
        self.reason = reason
        self.path = path
