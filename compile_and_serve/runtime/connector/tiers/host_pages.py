"""`HostPages`: which contents lie in the host's memory, and where. The scheduler decides; every rank has its part in equal places."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    """users: transfers that read or write the pages. is_whole: the content is there. is_stale: it is not wanted any more."""

    pages: list[int]
    users: int = 0
    is_whole: bool = False
    is_stale: bool = False


class HostPages:
    """`num_pages` pages, of which each content takes one or several. The least recently used contents give way.

    on_change: called with a content's key and whether it is there now.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_change: Callable[[bytes, bool], None] | None = None
        self.num_evicted = 0  # contents
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    def __contains__(self, key: bytes) -> bool:
        """Whether the content is there, as a whole."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_whole

    def is_known(self, key: bytes) -> bool:
        """Whether the content is there, or on its way."""
        return key in self._entries

    def use(self, key: bytes) -> list[int]:
        """The pages of a content that is there. They stay until `release`."""
        entry = self._entries[key]
        entry.users += 1
        self._entries.move_to_end(key)
        return entry.pages

    def allocate(self, key: bytes, count: int, keep: Collection[bytes] = ()) -> list[int] | None:
        """Pages for a content that will be written there, until `release`. None if there is no room. keep: contents that stay."""
        assert key not in self._entries, "the content is there, or on its way"
        if count > self.num_pages:
            return None
        if len(self._free) < count:
            for other in list(self._entries):
                if not self._entries[other].users and other not in keep:
                    self._free += self._pop(other).pages
                    self.num_evicted += 1
                    if len(self._free) >= count:
                        break
            else:
                return None
        entry = self._entries[key] = _Entry([self._free.pop() for _ in range(count)], users=1)
        return entry.pages

    def release(self, key: bytes, *, is_whole: bool) -> None:
        """A transfer is through with the content. is_whole: it is there now; if not, and nobody else uses it, its pages are free again."""
        entry = self._entries[key]
        entry.users -= 1
        if is_whole and not entry.is_whole and not entry.is_stale:
            entry.is_whole = True
            if self.on_change is not None:
                self.on_change(key, True)
        if not entry.is_whole and not entry.users:
            self._free += self._entries.pop(key).pages

    def set_aside(self, key: bytes) -> None:
        """A transfer was given up, but may still write the pages: nothing else gets them."""
        if key in self._entries:
            self._pop(key)

    def forget(self) -> None:
        """Forget all contents that no transfer uses."""
        for key in [key for key, entry in self._entries.items() if not entry.users]:
            self._free += self._pop(key).pages
        for key, entry in self._entries.items():
            self._note_removed(key, entry)
            entry.is_whole, entry.is_stale = False, True

    def _pop(self, key: bytes) -> _Entry:
        entry = self._entries.pop(key)
        self._note_removed(key, entry)
        return entry

    def _note_removed(self, key: bytes, entry: _Entry) -> None:
        if entry.is_whole and self.on_change is not None:
            self.on_change(key, False)
