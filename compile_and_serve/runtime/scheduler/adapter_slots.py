"""`AdapterSlots`: which LoRA adapters lie in the device's slots, and which of them running requests use."""

from __future__ import annotations

from collections import Counter, OrderedDict


class AdapterSlots:
    """An adapter that no running request uses keeps its slot until another adapter needs it; the least recently used goes first.

    num_unfinished: of each adapter, requests that wait or run.

    Pinned adapters keep theirs. One slot is never pinned, so that every adapter can run.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots, self._free = num_slots, list(range(num_slots))
        self.num_unfinished: Counter[int] = Counter()
        self._pinned: set[int] = set()
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter → slot, the least recently used first
        self._num_running: dict[int, int] = {}  # adapter → running requests
        self._new: list[tuple[int, int]] = []  # (slot, adapter) to load before the next step

    def forget(self) -> None:
        """Forget what lies in the slots. No request may be running."""
        assert not self._num_running, "running requests use adapters"
        self._free = sorted([*self._free, *self._slots.values()])
        self._slots.clear()
        self._new.clear()

    def has_room(self, adapter: int) -> bool:
        """Whether `acquire` is possible."""
        return adapter in self._slots or bool(self._free) or self._victim() is not None

    def acquire(self, adapter: int) -> int:
        """The slot of a request's adapter; the request begins to run."""
        if adapter not in self._slots:
            if self._free:
                slot = self._free.pop(0)
            else:
                victim = self._victim()
                assert victim is not None
                slot = self._slots.pop(victim)
                self._new = [entry for entry in self._new if entry[0] != slot]
            self._slots[adapter] = slot
            self._new.append((slot, adapter))
        self._slots.move_to_end(adapter)
        self._num_running[adapter] = self._num_running.get(adapter, 0) + 1
        return self._slots[adapter]

    def _victim(self) -> int | None:
        """The adapter that loses its slot next."""
        return next((other for other in self._slots if other not in self._num_running and other not in self._pinned), None)

    def pin(self, adapter: int) -> None:
        """Let the adapter keep its slot once it has one. Raises `ValueError` where only one slot is left for the others."""
        if adapter not in self._pinned and len(self._pinned) + 1 >= self._num_slots:
            raise ValueError(
                f"{len(self._pinned)} adapters are pinned, and one of the {self._num_slots} slots stays free for others: raise --max-loras."
            )
        self._pinned.add(adapter)

    def unpin(self, adapter: int) -> None:
        """Undo `pin`; an adapter that is not pinned stays as it is."""
        self._pinned.discard(adapter)

    def is_used(self, adapter: int) -> bool:
        """Whether an unfinished request uses the adapter, or it is pinned."""
        return self.num_unfinished[adapter] > 0 or self.is_pinned(adapter)

    def is_pinned(self, adapter: int) -> bool:
        return adapter in self._pinned

    def release(self, adapter: int) -> None:
        """One of the adapter's requests runs no more."""
        self._num_running[adapter] -= 1
        if not self._num_running[adapter]:
            del self._num_running[adapter]

    def take_new(self) -> list[tuple[int, int]]:
        """What to load before the step that is being scheduled."""
        new, self._new = self._new, []
        return new
