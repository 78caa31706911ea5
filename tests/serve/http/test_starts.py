"""Requests that arrive together begin a few at a time, so that everything else has its turn."""

from __future__ import annotations

import asyncio
import itertools

from compile_and_serve.serve.http.http_protocol import _STARTS_PER_TURN, _Starts


async def test_a_turn_of_the_loop_starts_a_few_in_order() -> None:
    starts, started, turns = _Starts(), [], []
    loop = asyncio.get_running_loop()
    for number in range(5 * _STARTS_PER_TURN):
        starts.start(loop, lambda number=number: started.append(number), at_once=False)  # type: ignore[misc]
    assert started == list(range(_STARTS_PER_TURN))
    starts.start(loop, lambda: started.append(-1), at_once=True)  # a probe overtakes those that wait
    assert started.pop() == -1
    while len(started) < 5 * _STARTS_PER_TURN:
        turns.append(len(started))
        await asyncio.sleep(0)
    assert started == list(range(5 * _STARTS_PER_TURN))
    assert all(after - before <= _STARTS_PER_TURN for before, after in itertools.pairwise(turns))
    await asyncio.sleep(0.01)
    starts.start(loop, lambda: started.append(99), at_once=False)
    assert started[-1] == 99  # at once, when nobody waits
