"""`ExpertBalancer`: plans where experts go, from the tokens that they got, and hands out the moves in small pieces, one beside a step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence

from compile_and_serve.runtime.engine.expert_placement import (
    Move,
    Turns,
    balanced,
    balanced_turns,
    imbalance,
    loads_of_ranks,
    moves_between,
)
from compile_and_serve.runtime.eplb_config import ExpertBalanceConfig
from compile_and_serve.runtime.scheduler.step_messages import ExpertMoves, SchedulerOutput, SpreadInfo

logger = logging.getLogger(__name__)

WORTH_IT = 0.05  # a layer's experts move if its busiest rank gets this share less to do
MOVES_PER_STEP = 2  # to launch one takes a rank's host about 0.3 ms


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
        self._loads: list[list[int]] = []  # that the last plan is about
        self._unplanned: deque[int] = deque()  # layers
        self._moving: deque[_MovingLayer] = deque()
        self._balance: list[tuple[float, float]] = []  # of each layer of the last plan: imbalance before it, and with it
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
        """Whether the last plan is not done yet."""
        return bool(self._unplanned or self._moving)

    def begin(self, scheduled: SchedulerOutput) -> None:
        """A step is about to be launched: give it its share of the moves."""
        self._steps += 1
        if self._unplanned:
            self._plan_layer(self._unplanned.popleft())  # one a step, and no moves beside it, because it takes milliseconds
            return
        if not self._moving:
            return
        moves, num_bytes = ExpertMoves(), 0
        # Moves of a layer build on one another, so a step has one of each layer at most.
        for _ in range(min(len(self._moving), MOVES_PER_STEP)):
            layer = self._moving[0]
            num_bytes += len(layer.copies) * self.spread.bytes_of_expert
            if moves.copies and num_bytes > self._config.bytes_per_step:
                break
            self._moving.popleft()
            self.num_moves += bool(layer.copies)
            moves.copies += [(layer.number, slot, source) for slot, source in layer.copies]
            if layer.advance():
                self._moving.append(layer)
            else:
                moves.turns.append((layer.number, self.turns[layer.number]))
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
        if self.is_moving or self._steps - self._planned_at < config.step_interval or len(now) != len(self.placements):
            return
        self._planned_at = self._steps
        self.num_plans += 1
        self._loads = now if len(self._counts) == 1 else _since(self._counts[0][1], now)
        self._unplanned.extend(range(len(now)))
        self._balance.clear()

    def _plan_layer(self, layer: int) -> None:
        loads, current, num_ranks = self._loads[layer], self.placements[layer], self.spread.num_ranks
        worst = imbalance(loads_of_ranks(loads, current, self.turns[layer], num_ranks))
        target = balanced(loads, current, num_ranks)
        turns = balanced_turns(loads, target, num_ranks)
        best = imbalance(loads_of_ranks(loads, target, turns, num_ranks))
        is_worth_it = any(loads) and worst - best >= WORTH_IT * worst
        self._balance.append((worst, best if is_worth_it else worst))
        if is_worth_it:
            self._moving.append(_MovingLayer(layer, moves_between(current, target)))
            self.placements[layer], self.turns[layer] = target, turns
        if self._config.log_balancedness and not self._unplanned:
            worst, best = (sum(one[at] for one in self._balance) / len(self._balance) for at in (0, 1))
            logger.info("Experts: the busiest rank has %.2f times the mean, %.2f once they have moved.", worst, best)


class _MovingLayer:
    """A layer on the way to its placement. copies: its next move, if one is left."""

    def __init__(self, number: int, moves: Iterator[Move]) -> None:
        self.number, self._moves = number, moves
        self.copies: tuple[tuple[int, int], ...] = ()
        self.advance()

    def advance(self) -> bool:
        """Go on to the next move. → whether there is one"""
        move = next(self._moves, None)
        self.copies = () if move is None else move.copies
        return move is not None


def _since(before: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[b - a for a, b in zip(*layer, strict=True)] for layer in zip(before, now, strict=True)]
