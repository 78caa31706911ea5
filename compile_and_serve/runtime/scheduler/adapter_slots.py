"""`AdapterSlots`: which LoRA adapters lie in the device's slots, and which of them running requests use."""

from __future__ import annotations

from collections import OrderedDict


class AdapterSlots:
    """An adapter that no running request uses keeps its slot until another adapter needs it; the least recently used goes first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))
        self._slots: OrderedDict[int, int] = OrderedDict()  # adapter → slot, the least recently used first
        self._num_running: dict[int, int] = {}  # adapter → running requests
        self._new: list[tuple[int, int]] = []  # (slot, adapter) to load before the next step

    def has_room(self, adapter: int) -> bool:
        """Whether `acquire` is possible."""
        return adapter in self._slots or bool(self._free) or len(self._num_running) < len(self._slots)

    def acquire(self, adapter: int) -> int:
        """The slot of a request's adapter; the request begins to run."""
        if adapter not in self._slots:
            if self._free:
                slot = self._free.pop(0)
            else:
                victim = next(other for other in self._slots if other not in self._num_running)
                slot = self._slots.pop(victim)
                self._new = [entry for entry in self._new if entry[0] != slot]
            self._slots[adapter] = slot
            self._new.append((slot, adapter))
        self._slots.move_to_end(adapter)
        self._num_running[adapter] = self._num_running.get(adapter, 0) + 1
        return self._slots[adapter]

    def release(self, adapter: int) -> None:
        """One of the adapter's requests runs no more."""
        self._num_running[adapter] -= 1
        if not self._num_running[adapter]:
            del self._num_running[adapter]

    def take_new(self) -> list[tuple[int, int]]:
        """What to load before the step that is being scheduled."""
        new, self._new = self._new, []
        return new
