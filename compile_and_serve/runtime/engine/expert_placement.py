"""Where the experts of a layer should be, from the tokens that each got, and in which small moves they get there.

Slots are numbered rank by rank, as in `custom_ops/moe/placement.py`. A placement is a list with the expert of each slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from compile_and_serve.custom_ops.moe.turns import TURNS

Placement = list[int]
Turns = dict[int, list[int]]  # expert with several slots → the slot of each turn


class Move(NamedTuple):
    """What slots get, all at once: (slot, slot whose expert it gets)."""

    copies: tuple[tuple[int, int], ...]

    def of(self, placement: Sequence[int]) -> Placement:
        """The placement afterwards."""
        found = list(placement)
        for slot, source in self.copies:
            found[slot] = placement[source]
        return found


def balanced(loads: Sequence[float], placement: Sequence[int], num_ranks: int) -> Placement:
    """A placement on as many slots whose ranks have about equal loads. Experts stay in their slots where they can."""
    num_slots = len(placement) // num_ranks
    pieces = _with_copies(loads, len(placement))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    # A bit of load for each piece, so that experts without tokens are spread, too.
    least = max(sum(loads), 1.0) / len(placement) / 1000
    for load, expert in pieces:
        free = [rank for rank in range(num_ranks) if len(ranks[rank]) < num_slots]
        without = [rank for rank in free if expert not in ranks[rank]] or free
        rank = min(without, key=lambda rank: (sums[rank], len(ranks[rank])))
        ranks[rank].append(expert)
        sums[rank] += load + least
    return _kept_in_place(ranks, placement, num_slots)


def _with_copies(loads: Sequence[float], num_slots: int) -> list[tuple[float, int]]:
    """(load, expert) for each slot, the largest first: the expert with the largest load per slot gets each further one."""
    copies = [1] * len(loads)
    for _ in range(num_slots - len(loads)):
        copies[max(range(len(loads)), key=lambda expert: (loads[expert] / copies[expert], -copies[expert]))] += 1
    pieces = [(loads[expert] / copies[expert], expert) for expert in range(len(loads)) for _ in range(copies[expert])]
    return sorted(pieces, key=lambda piece: (-piece[0], piece[1]))


def _kept_in_place(ranks: Sequence[Sequence[int]], placement: Sequence[int], num_slots: int) -> Placement:
    """The groups of experts on the ranks that have most of them already, each expert in its old slot if the rank has it."""
    before = [list(placement[rank * num_slots : (rank + 1) * num_slots]) for rank in range(len(ranks))]
    left, found = set(range(len(ranks))), [-1] * len(placement)
    pairs = sorted(((_overlap(group, before[rank]), -at, -rank) for at, group in enumerate(ranks) for rank in left), reverse=True)
    used: set[int] = set()
    for _, at, rank in pairs:
        if -at in used or -rank not in left:
            continue
        used.add(-at)
        left.discard(-rank)
        begin, missing = -rank * num_slots, list(ranks[-at])
        for slot in range(begin, begin + num_slots):
            if placement[slot] in missing:
                found[slot] = placement[slot]
                missing.remove(placement[slot])
        free = (slot for slot in range(begin, begin + num_slots) if found[slot] < 0)
        for slot, expert in zip(free, missing, strict=True):
            found[slot] = expert
    return found


def _overlap(group: Sequence[int], others: Sequence[int]) -> int:
    left, count = list(others), 0
    for expert in group:
        if expert in left:
            left.remove(expert)
            count += 1
    return count


def balanced_turns(loads: Sequence[float], placement: Sequence[int], num_ranks: int) -> Turns:
    """The turns of the experts with several slots, so that the ranks' loads become as equal as they can."""
    num_slots = len(placement) // num_ranks
    slots_of = _slots_of(placement)
    sums = [0.0] * num_ranks
    for expert, slots in slots_of.items():
        if len(slots) == 1:
            sums[slots[0] // num_slots] += loads[expert]
    turns: Turns = {}
    for expert in sorted((one for one, slots in slots_of.items() if len(slots) > 1), key=lambda one: (-loads[one], one)):
        slots = slots_of[expert]
        counts = dict.fromkeys(slots, 0)
        for _ in range(TURNS):
            slot = min(slots, key=lambda slot: (sums[slot // num_slots], counts[slot], slot))
            counts[slot] += 1
            sums[slot // num_slots] += loads[expert] / TURNS
        turns[expert] = _interleaved(counts)
    return turns


def _interleaved(counts: dict[int, int]) -> list[int]:
    """Each slot as often as it has turns, evenly among the others', so that few tokens are divided as many are."""
    places = [((at + 0.5) / count, slot) for slot, count in counts.items() for at in range(count)]
    return [slot for _, slot in sorted(places)]


def loads_of_ranks(loads: Sequence[float], placement: Sequence[int], turns: Turns, num_ranks: int) -> list[float]:
    """The load of each rank. An expert that `turns` does not name divides its turns evenly."""
    num_slots = len(placement) // num_ranks
    sums = [0.0] * num_ranks
    for expert, slots in _slots_of(placement).items():
        for slot in turns.get(expert, slots):
            sums[slot // num_slots] += loads[expert] / len(turns.get(expert, slots))
    return sums


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 without any."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0


def moves_between(placement: Sequence[int], target: Sequence[int]) -> Iterator[Move]:
    """Moves from one placement to another with the same experts, of two slots at most. In between, every expert has a slot."""
    current = list(placement)
    while True:
        wrong = [slot for slot in range(len(current)) if current[slot] != target[slot]]
        if not wrong:
            return
        # Without an exchange first: a slot whose expert has another one.
        slot = next((one for one in wrong if current.count(current[one]) > 1), wrong[0])
        holders = [one for one, expert in enumerate(current) if expert == target[slot]]
        source = next((one for one in holders if current[one] != target[one]), holders[0])
        is_last = current.count(current[slot]) == 1
        if is_last and current[source] == target[source]:
            # Its expert goes where it is missing, in exchange.
            source = next(one for one in wrong if target[one] == current[slot])
        move = Move(((slot, source), (source, slot)) if is_last else ((slot, source),))
        current = move.of(current)
        yield move


def _slots_of(placement: Sequence[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for slot, expert in enumerate(placement):
        found.setdefault(expert, []).append(slot)
    return found
