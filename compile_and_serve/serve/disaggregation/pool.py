"""`ServerPool`: servers of one kind, which of them live, and which one gets the next request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import httpx

from compile_and_serve.runtime.engine.router import MAX_HASHED_BLOCKS, Router
from compile_and_serve.runtime.kv_events.wire import DEVICE, BlockStored, Event
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 1.0  # between looks, and that an answer may take
_PIECE = 64  # of a prompt's text, or tokens of a block where events name them
_MAX_PIECES = 1 << 16  # that are remembered for each server
_MAX_RUNNING = 256  # requests of which a server counts as full, for the balance between load and known prefixes


class ServerPool:
    """urls: of the servers, without /v1. block_size: tokens of a block, where the servers' events are followed; None: they are not, and the
    pool remembers which text it sent where.
    """

    def __init__(self, urls: Sequence[str], http: httpx.AsyncClient, *, block_size: int | None = None) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.is_up = [True] * len(urls)
        self.num_sent = [0] * len(urls)
        self._http, self._size = http, block_size or _PIECE
        self.knows_tokens = block_size is not None
        self._router = Router(len(urls), max_num_seqs=_MAX_RUNNING, num_blocks=_MAX_PIECES, block_size=self._size)
        self._num_routed = 0
        self._has_other_blocks: set[int] = set()  # servers whose events name blocks of another size

    @property
    def num_up(self) -> int:
        """Servers that answer."""
        return sum(self.is_up)

    def choose(self, prompt: Sequence[int], salt: str | None, tried: Sequence[int]) -> tuple[int, str] | None:
        """The server that has most of the prompt, or the least to do, and a name for `finish`; None if all were tried or are down.

        prompt: token ids, or bytes of its text.
        """
        usable = [index for index in range(len(self.urls)) if self.is_up[index] and index not in tried]
        if not usable:
            return None
        self._num_routed += 1
        name = str(self._num_routed)
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=list(prompt[: MAX_HASHED_BLOCKS * self._size]),
            sampling_params=SamplingParams(),
            cache_salt=salt,
        )
        index = self._router.route(request, usable)
        self.num_sent[index] += 1
        return index, name

    def finish(self, name: str) -> None:
        """A request has ended."""
        self._router.finish(name)

    def observe_events(self, index: int, events: Sequence[Event]) -> None:
        """What a server has cached and forgotten. Blocks of another size are never found, which is logged once."""
        stored = (one for one in events if isinstance(one, BlockStored) and one.medium == DEVICE and one.group_idx == 0)
        size = next((one.block_size for one in stored), self._size)
        if size != self._size and index not in self._has_other_blocks:
            self._has_other_blocks.add(index)
            text = "%s has blocks of %d tokens, not %d: what it has cached is not found. Start `route` with --block-size %d."
            logger.warning(text, self.urls[index], size, self._size, size)
        self._router.observe_events(index, events)

    def set_down(self, index: int) -> None:
        """A server does not answer: it gets nothing until it is well again."""
        if self.is_up[index]:
            logger.warning("%s does not answer.", self.urls[index])
        self.is_up[index] = False
        self._router.set_down(index, is_down=True)

    async def watch(self) -> None:
        """Look after the servers' health, for ever."""
        while True:
            await asyncio.gather(*(self._look(index) for index in range(len(self.urls))))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _look(self, index: int) -> None:
        is_up = False
        with contextlib.suppress(httpx.HTTPError):
            is_up = (await self._http.get(self.urls[index] + "/health", timeout=HEALTH_SECONDS)).status_code == 200
        if is_up and not self.is_up[index]:
            logger.info("%s answers again.", self.urls[index])
            self.is_up[index] = True
            self._router.set_down(index, is_down=False)
        elif not is_up:
            self.set_down(index)
