"""`ExpertBalancer`: plans where experts go, from the tokens that they got, and hands out the moves in small pieces, one beside a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from compile_and_serve.runtime.engine.expert_placement import Turns, balanced, balanced_turns, imbalance, loads_of_ranks, moves_between
from compile_and_serve.runtime.eplb_config import ExpertBalanceConfig
from compile_and_serve.runtime.scheduler.step_messages import ExpertMoves, SchedulerOutput, SpreadInfo

logger = logging.getLogger(__name__)

WORTH_IT = 0.05  # a layer's experts move if its busiest rank gets this share less to do


class ExpertBalancer:
    """config: its options. spread: what the ranks have at the start."""

    def __init__(self, config: ExpertBalanceConfig, spread: SpreadInfo) -> None:
        self._config, self.spread = config, spread
        self.reset()

    def reset(self) -> None:
        """Every expert is where it was at the start: the weights were loaded."""
        self.placements = [list(one) for one in self.spread.placements]
        self.turns: list[Turns] = [{} for _ in self.placements]
        self.num_plans = self.num_moves = 0
        self._queue: deque[tuple[int, tuple[tuple[int, int], ...], Turns | None]] = deque()
        self._steps = 0
        self._planned_at = 0  # step
        self._counts: deque[tuple[int, list[list[int]]]] = deque()  # step, tokens of each expert of each layer up to there

    @property
    def counted(self) -> list[list[int]]:
        """Tokens of each expert of each layer since the start, as far as they are known."""
        return self._counts[-1][1] if self._counts else []

    @property
    def last_window(self) -> list[list[int]]:
        """The same between the last two times that they were read."""
        (_, before), (_, now) = self._counts[-2], self._counts[-1]
        return _since(before, now)

    @property
    def is_moving(self) -> bool:
        """Whether moves are left of the last plan."""
        return bool(self._queue)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """A step is about to be launched: give it its share of the moves."""
        self._steps += 1
        if not self._queue:
            return
        moves, num_bytes = ExpertMoves(), 0
        changed: set[int] = set()
        while self._queue:
            layer, copies, turns = self._queue[0]
            size = len(copies) * self.spread.bytes_of_expert
            # Moves of one layer may build on one another, so a step has one of each layer at most.
            if (moves.copies and num_bytes + size > self._config.bytes_per_step) or (copies and layer in changed):
                break
            self._queue.popleft()
            num_bytes += size
            if copies:
                changed.add(layer)
                self.num_moves += 1
                moves.copies += [(layer, slot, source) for slot, source in copies]
            if turns is not None:
                moves.turns.append((layer, turns))
        for one in (scheduled, *scheduled.groups):
            one.expert_moves = moves

    def take(self, expert_tokens: Sequence[Sequence[int]]) -> None:
        """The tokens of each expert of each layer since the start; empty if there is nothing new."""
        if not expert_tokens:
            return
        config, now = self._config, [list(one) for one in expert_tokens]
        self._counts.append((self._steps, now))
        while len(self._counts) > 1 and self._counts[1][0] <= self._steps - config.window_size:
            self._counts.popleft()
        if self._queue or self._steps - self._planned_at < config.step_interval or len(now) != len(self.placements):
            return
        self._planned_at = self._steps
        self._plan(now if len(self._counts) == 1 else _since(self._counts[0][1], now))

    def _plan(self, loads: Sequence[Sequence[int]]) -> None:
        num_ranks, of_plan = self.spread.num_ranks, []
        for layer, counts in enumerate(loads):
            current = self.placements[layer]
            worst = imbalance(loads_of_ranks(counts, current, self.turns[layer], num_ranks))
            target = balanced(counts, current, num_ranks)
            turns = balanced_turns(counts, target, num_ranks)
            best = imbalance(loads_of_ranks(counts, target, turns, num_ranks))
            if not any(counts) or worst - best < WORTH_IT * worst:
                of_plan.append((worst, worst))
                continue
            of_plan.append((worst, best))
            self._queue.extend((layer, move.copies, None) for move in moves_between(current, target))
            self._queue.append((layer, (), turns))
            self.placements[layer], self.turns[layer] = target, turns
        self.num_plans += 1
        # Layers take turns, so that a step moves experts of several.
        self._queue = deque(_round_robin(self._queue))
        if self._config.log_balancedness:
            worst, best = (sum(one[at] for one in of_plan) / len(of_plan) for at in (0, 1))
            logger.info("Experts: the busiest rank has %.2f times the mean, %.2f after %d moves.", worst, best, len(self._queue))


def _since(before: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[b - a for a, b in zip(*layer, strict=True)] for layer in zip(before, now, strict=True)]


def _round_robin(
    queue: Sequence[tuple[int, tuple[tuple[int, int], ...], Turns | None]],
) -> list[tuple[int, tuple[tuple[int, int], ...], Turns | None]]:
    of_layers: dict[int, deque[tuple[int, tuple[tuple[int, int], ...], Turns | None]]] = {}
    for one in queue:
        of_layers.setdefault(one[0], deque()).append(one)
    found = []
    while of_layers:
        for layer in list(of_layers):
            found.append(of_layers[layer].popleft())
            if not of_layers[layer]:
                del of_layers[layer]
    return found
