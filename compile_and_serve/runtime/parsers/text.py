"""Search for markers in text that arrives in chunks."""

from __future__ import annotations

from collections.abc import Iterable


def find_marker(text: str, markers: Iterable[str]) -> tuple[int, str | None]:
    """Position of the first marker in `text`, and the marker.

    Without one: the position from which `text` may be the beginning of a marker (its length if it cannot be), and None.
    """
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, _, marker = min(found)
        return at, marker
    return len(text) - _partial(text, markers), None


def _partial(text: str, markers: Iterable[str]) -> int:
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


def may_become(text: str, markers: Iterable[str]) -> bool:
    """Whether `text` is a proper beginning of one of the markers."""
    return any(len(text) < len(marker) and marker.startswith(text) for marker in markers)
