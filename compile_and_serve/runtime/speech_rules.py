"""`SpeechRules`: which tokens of a transcript may follow which, of models of the Whisper kind."""

from __future__ import annotations

import msgspec


class SpeechRules(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """suppressed: ids that are never sampled; suppressed_first: not as the first token. end: ends a transcript; ids from there on are no
    text. has_times: the transcript has timestamps, the ids behind no_timestamps. They begin it (with one of the first max_initial + 1,
    unless that is None), come in pairs but for the first and the last, never go back, and one is sampled where all of them together are
    likelier than any other token.
    """

    suppressed: list[int] = []
    suppressed_first: list[int] = []
    end: int
    no_timestamps: int
    has_times: bool = False
    max_initial: int | None = None

    @property
    def first_time(self) -> int:
        """The timestamp of 0 seconds."""
        return self.no_timestamps + 1
