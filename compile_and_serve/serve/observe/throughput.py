"""A log line about throughput every few seconds while there is load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass

from compile_and_serve.runtime.messages import EngineStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TokenCounts:
    """Tokens since the start: of prompts whose prefill has ended, and generated."""

    prompt: int = 0
    generation: int = 0


def total_load(replicas: Collection[EngineStats]) -> tuple[int, int, float]:
    """Sequences that run, sequences that wait, and the mean share of the KV cache in use, 0 to 1."""
    kv_usage = sum(one.kv_cache_usage for one in replicas) / max(1, len(replicas))
    num_waiting = sum(one.num_waiting + one.num_held for one in replicas)
    return sum(one.num_running for one in replicas), num_waiting, kv_usage


class ThroughputLog:
    """tokens: counts that the owner increases. stats: the last ones by replica, which the owner replaces."""

    def __init__(self, tokens: TokenCounts, stats: dict[int, EngineStats]) -> None:
        self._tokens, self._stats = tokens, stats
        self._before = TokenCounts()
        self._hits = self._queries = 0
        self._at = time.monotonic()

    async def run(self, seconds: float) -> None:
        """Write a line every `seconds` in which there was load, until cancelled."""
        while True:
            await asyncio.sleep(seconds)
            self.write()

    def write(self) -> None:
        """Write the line about the time since the last one, if there was load."""
        now, tokens, before = time.monotonic(), self._tokens, self._before
        seconds, self._at = max(now - self._at, 1e-3), now
        replicas = self._stats.values()
        prompt = (tokens.prompt - before.prompt) / seconds
        generation = (tokens.generation - before.generation) / seconds
        self._before = TokenCounts(tokens.prompt, tokens.generation)
        running, waiting, kv_usage = total_load(replicas)
        hits = sum(one.prefix_cache_hits for one in replicas)
        queries = sum(one.prefix_cache_queries for one in replicas)
        looked_up = queries - self._queries
        hit_share = (hits - self._hits) / looked_up if looked_up > 0 else 0.0
        self._hits, self._queries = hits, queries
        if not (prompt or generation or running or waiting):
            return
        logger.info(
            "Prompts %.1f tok/s, generation %.1f tok/s; %d running, %d waiting; KV cache %.1f %% used, prefix hits %.1f %%",
            prompt,
            generation,
            running,
            waiting,
            100 * kv_usage,
            100 * hit_share,
            extra={
                "prompt_tokens_per_second": round(prompt, 1),
                "generation_tokens_per_second": round(generation, 1),
                "running": running,
                "waiting": waiting,
                "kv_cache_usage": round(kv_usage, 4),
                "prefix_hit_share": round(hit_share, 4),
            },
        )
