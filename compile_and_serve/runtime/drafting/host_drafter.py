"""`HostDrafter`: what drafts from token histories. `DeviceDrafts` is what drafts on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class HostDrafter(Protocol):
    """Guesses how sequences go on from their tokens alone. It keeps an index of each sequence until `forget`."""

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Up to `max_tokens` tokens that may follow `token_ids`: the prompt and what was generated. Between two calls for a request,
        token_ids only grows.
        """
        ...

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        """The request has ended with this output, or is unknown."""
        ...


@dataclass(frozen=True)
class ConstantDrafter:
    """As many draft tokens as fit, all of them alike. token: None: the last one. -1 asks the runner for tokens."""

    token: int | None

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        return [token_ids[-1] if self.token is None else self.token] * max_tokens

    def forget(self, request_id: str, output_ids: Sequence[int]) -> None:
        pass


def copy_from(token_ids: Sequence[int], begin: int, count: int) -> list[int]:
    """`count` tokens from position `begin` on; behind the end the copy goes on with itself, as a repeating text does."""
    draft = list(token_ids[begin : begin + count])
    period = len(draft)
    while len(draft) < count:
        draft.append(draft[len(draft) - period])
    return draft
