"""The canary (`--verify-state`): is the state of requests still what the steps left, and do the device's tables say where it lies?

Content that is cached is complete, and nobody writes it again. So its checksum must stay what it was when the canary first looked. Each
round takes the checksums of a few random blocks (keys and values, or snapshots of recurrent state), and compares those that it knows. It
also compares the device's block tables of a few requests with the blocks that these requests hold.

A finding ends the requests that hold the block, and takes it out of the prefix cache. The server goes on.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Mapping

from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.scheduler.block_pool import BlockPool, KVCacheBlock
from compile_and_serve.runtime.scheduler.kv_groups import group_of_key
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StateChecks, StateGroupInfo

logger = logging.getLogger(__name__)

BLOCKS_PER_ROUND = 8  # half of them known, half new
REQUESTS_PER_ROUND = 2
MAX_KNOWN = 1 << 16
_KEPT_STEPS = 512


class Canary:
    """requests: the unfinished ones. steps_in_flight: at once, at most. seconds: between two rounds, at least. clock: for the rounds.

    num_checked, num_tables: blocks and requests' tables that were compared. num_findings, findings: sentences, the last ones.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: list[StateGroupInfo],
        requests: Mapping[str, Request],
        *,
        steps_in_flight: int,
        seconds: float = 0.25,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_checked = self.num_tables = self.num_findings = 0
        self.findings: list[str] = []
        self._pool, self._requests = pool, requests
        self._token_groups = [number for number, group in enumerate(groups) if group.kind == "tokens"]
        self.seconds, self._clock = seconds, clock
        self._steps_in_flight = max(2, steps_in_flight)
        self._random = random.Random(seed)
        self._last_round = -seconds
        # Block → its key and the step that computed it, its checksum, the step before which it had it. Another step may have computed the
        # same key again: with other roundings, and with other bytes where a snapshot has none of its own.
        self._known: dict[int, tuple[tuple[bytes, int], int, int]] = {}
        self._planned: dict[int, list[tuple[KVCacheBlock, tuple[bytes, int]]]] = {}  # by step
        self._ran: deque[tuple[int, list[str]]] = deque(maxlen=_KEPT_STEPS)  # step → its requests
        self._to_end: dict[str, str] = {}  # request → sentence

    def plan(self, scheduled: SchedulerOutput) -> None:
        """Let the step take checksums before it runs, and read the tables after that."""
        if not scheduled.num_scheduled_tokens:
            return
        self._ran.append((scheduled.step, list(scheduled.num_scheduled_tokens)))
        now = self._clock()
        if now - self._last_round < self.seconds:
            return
        self._last_round = now
        blocks = self._choose(scheduled.step)
        self._planned[scheduled.step] = blocks
        names = self._random.sample(list(scheduled.num_scheduled_tokens), min(REQUESTS_PER_ROUND, len(scheduled.num_scheduled_tokens)))
        tables = {}
        for name in names:
            if (request := self._requests.get(name)) is not None and request.block_ids:
                tables[name] = [
                    (number, request.num_freed_blocks[number], request.block_ids[number].copy()) for number in self._token_groups
                ]
        pages = [(group_of_key(key), block.block_id) for block, (key, _) in blocks]
        scheduled.checks = StateChecks(pages=pages, tables=tables)

    def take(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Compare what the step found. Requests that are not what they should be get an entry in `result.errors`."""
        planned = self._planned.pop(scheduled.step, [])
        for (block, content), checksum in zip(planned, result.checksums, strict=bool(result.checksums)):
            known = self._known.get(block.block_id)
            if known is not None and known[0] == content:
                self.num_checked += 1
                if known[1] != checksum:
                    self._overwritten(block, content[0], known[2], scheduled.step)
                    continue
            self._known[block.block_id] = content, checksum, scheduled.step
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self.num_tables += 0 if scheduled.checks is None else len(scheduled.checks.tables)
        for name, sentence in result.wrong_tables.items():
            self._end(name, f"The canary found a wrong block table of request {name} in step {scheduled.step}: {sentence}")
        for name in [name for name in self._to_end if name in scheduled.num_scheduled_tokens]:
            result.errors[name] = self._to_end.pop(name)
            result.sampled_token_ids.pop(name, None)
        for name in [name for name in self._to_end if name not in self._requests]:
            del self._to_end[name]

    def add_to(self, stats: EngineStats) -> None:
        """Say what was checked and found."""
        stats.canary_checked_blocks += self.num_checked
        stats.canary_findings += self.num_findings

    def _content(self, block: KVCacheBlock) -> tuple[bytes, int] | None:
        """The key of a block's content, and the step that computed it; None if nothing is cached there."""
        first = None if block.key is None else self._pool.cached.get(block.key)
        return None if block.key is None or first is None else (block.key, first.step)

    def _choose(self, step: int) -> list[tuple[KVCacheBlock, tuple[bytes, int]]]:
        """Blocks whose content is complete before `step`, with their content."""
        pool, chosen = self._pool, dict[int, tuple[KVCacheBlock, tuple[bytes, int]]]()
        known = self._random.sample(list(self._known), min(BLOCKS_PER_ROUND // 2, len(self._known)))
        for block_id in known:
            block = pool.blocks[block_id]
            content = self._content(block)
            if content is not None and content == self._known[block_id][0]:
                chosen[block_id] = block, content
            else:
                del self._known[block_id]
        for _ in range(4 * BLOCKS_PER_ROUND):
            if len(chosen) == BLOCKS_PER_ROUND:
                break
            block = pool.blocks[self._random.randrange(pool.num_blocks)]
            # What a step computes is cached when the step is scheduled, and a finished request's last steps may still be in flight.
            content = self._content(block)
            if content is not None and content[1] < step - self._steps_in_flight and block.block_id not in chosen:
                chosen[block.block_id] = block, content
        return list(chosen.values())

    def _overwritten(self, block: KVCacheBlock, key: bytes, whole_before: int, found_in: int) -> None:
        steps = [(number, names) for number, names in self._ran if whole_before <= number < found_in]
        names = list(dict.fromkeys(name for _, ran in steps for name in ran))
        when = f"step {whole_before}" if found_in - whole_before == 1 else f"one of the steps {whole_before} to {found_in - 1}"
        group = group_of_key(key)
        sentence = (
            f"The canary found that {when} overwrote block {block.block_id} of state group {group}, which was complete. "
            f"In these steps ran: {', '.join(names[:8]) or 'none'}{' and others' if len(names) > 8 else ''}."
        )
        self.end_holders(block, key, sentence)

    def end_holders(self, block: KVCacheBlock, key: bytes, sentence: str) -> None:
        """A block has not the content that its key names: end the requests that hold it, and let no others find it."""
        group = group_of_key(key)
        holders = [
            name
            for name, request in self._requests.items()
            if request.block_ids and block.block_id in request.block_ids[group][request.num_freed_blocks[group] :]
        ]
        self._known.pop(block.block_id, None)
        if block.key == key and key in self._pool.cached:
            self._pool.uncache(key)
        for name in holders:
            self._end(name, sentence)
        if not holders:
            self._note(sentence)

    def _end(self, name: str, sentence: str) -> None:
        self._note(sentence)
        self._to_end[name] = sentence

    def _note(self, sentence: str) -> None:
        if not self.findings or self.findings[-1] != sentence:
            logger.error("%s", sentence)
            self.findings.append(sentence)
            self.num_findings += 1
            del self.findings[:-100]
