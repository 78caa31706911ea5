"""`HandoverIndex`: the scheduler's side of a handover. It knows what is lent to other engines, and what requests can fetch from them.

An engine that computed a prompt lends its blocks: they stay until the other engine ends the lease, or the lease has lasted too long. The
other engine's request waits until its blocks are there. If they do not come, it computes its prompt.

Of a prompt that takes several steps, blocks can be lent early: under a name that the client chose, while the others are computed. The other
engine loads them into its prefix cache, and its request, which comes later, lacks the last ones alone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from compile_and_serve.runtime.connector.connector import PrefixQuery, SchedulerConnector
from compile_and_serve.runtime.connector.handover.config import of_replica
from compile_and_serve.runtime.connector.handover.control import ControlServer, Releases
from compile_and_serve.runtime.connector.handover.orders import FetchOrders, LendOrders, encode_orders
from compile_and_serve.runtime.connector.handover.params import OWN, OwnParams, Taken, direction_of, early_lease, read_taken
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers
from compile_and_serve.runtime.kv_config import KVTransferConfig

logger = logging.getLogger(__name__)

_KEPT_TIMES = 1000
_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class _Take:
    """A request that another engine began. loading: transfers under way. is_settled: nothing more will be loaded."""

    taken: Taken
    loading: int = 0
    began: float = 0.0
    is_settled: bool = False
    error: str | None = None


class HandoverIndex(SchedulerConnector):
    """num_ranks: that announce themselves."""

    def __init__(self, config: KVTransferConfig, replica: int, num_ranks: int) -> None:
        self.engine_id, self.port = of_replica(config, replica)
        self.deadline_seconds, self.lease_seconds = config.load_seconds, config.lease_seconds
        self._config, self._num_ranks = config, num_ranks
        self._control = ControlServer(config.host, self.port, engine_id=self.engine_id, secret=config.secret, num_ranks=num_ranks)
        self._releases = Releases()
        self._takes: dict[str, _Take] = {}  # by request
        self._leases: dict[str, list[int]] = {}  # by name: the transfers that lend
        self._lease_of: dict[int, str] = {}  # by transfer
        self._early: dict[str, str] = {}  # by request that is computed for another engine: the lease of what is lent early
        self._early_of: dict[str, str] = {}  # by lease of a request that was handed over: the early one, which ends with it
        self._take_of: dict[int, _Take] = {}  # by transfer
        self._order = b""  # for the next transfer
        self._fetching: _Take | None = None
        self._lent: tuple[str, list[list[int]], int] = ("", [], 0)  # by the last `lend`: name, blocks of each group, tokens
        counts = ("leases_released", "leases_expired", "given_blocks", "taken_blocks", "taken_requests", "early_requests", "failures")
        self._counts = dict.fromkeys(counts, 0)
        self._lent_blocks: dict[int, int] = {}  # by transfer
        self._times: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._said: set[str] = set()

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        if direction_of(params) == "give":
            if name := early_lease(params):
                self._early[request_id] = name
            return
        taken = read_taken(params)
        if taken.own.lease:
            self._takes[request_id] = _Take(taken)

    def settled(self, request_id: str) -> None:
        take = self._takes.pop(request_id, None)
        if take is not None:
            take.is_settled = True
            self._release_if_over(take)

    def match(self, query: PrefixQuery) -> int:
        take = self._takes.get(query.request_id)
        self._fetching = None
        if take is None or take.error is not None:
            return 0
        is_early = bool(take.taken.own.early)
        num_tokens = query.max_tokens if is_early else take.taken.num_tokens
        if num_tokens > query.max_tokens or num_tokens % query.alignment or num_tokens <= query.num_cached_tokens:
            return 0
        self._fetching = take
        one = take.taken
        self._order = encode_orders(FetchOrders(one.engine_id, one.host, one.port, one.own.lease, is_early))
        return num_tokens - query.num_cached_tokens

    def tiers_of(self, keys: Iterable[bytes]) -> dict[str, int]:
        return {"engine": sum(1 for _ in keys)}

    def prepare(self, transfer: BlockTransfer, *, is_load: bool) -> bytes:
        if is_load:
            take = self._fetching
            assert take is not None
            take.began = take.began or time.monotonic()
            take.loading += 1
            self._take_of[transfer.transfer_id] = take
        self._lent_blocks[transfer.transfer_id] = len(transfer.block_ids)
        return self._order

    def lend(self, block_ids: list[list[int]], num_tokens: int) -> None:
        lease = secrets.token_hex(16)
        self._order = encode_orders(LendOrders(lease))
        self._lent = lease, block_ids, num_tokens

    def lends_early(self, request_id: str) -> bool:
        if (name := self._early.get(request_id)) is not None:
            self._order = encode_orders(LendOrders(name))
        return name is not None

    def lent_early(self, request_id: str, transfer_ids: list[int]) -> None:
        name = self._early[request_id]
        self._leases.setdefault(name, []).extend(transfer_ids)
        self._lease_of |= dict.fromkeys(transfer_ids, name)

    def ended(self, request_id: str) -> None:
        if (name := self._early.pop(request_id, None)) is not None:
            self._control.released.append(name)

    def lent(
        self, request_id: str, params: Mapping[str, Any], transfer_ids: list[int], token_ids: list[int], logprobs: Any
    ) -> dict[str, Any]:
        own = msgspec.convert(params[OWN], OwnParams)
        own.lease, block_ids, num_tokens = self._lent if transfer_ids else ("", [], 0)
        if transfer_ids:
            self._leases[own.lease] = transfer_ids
            self._lease_of |= dict.fromkeys(transfer_ids, own.lease)
            self._counts["given_blocks"] += sum(map(len, block_ids))
        if not transfer_ids:
            self.ended(request_id)
        elif (early := self._early.pop(request_id, None)) is not None:
            self._early_of[own.lease] = early
        own.token_ids, own.logprobs, own.early = token_ids, logprobs, ""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_block_ids": block_ids,
            "remote_request_id": request_id,
            "remote_host": self._config.host,
            "remote_port": self.port,
            "tp_size": self._num_ranks,
            "remote_num_tokens": num_tokens,
            OWN: msgspec.to_builtins(own),
        }

    def take_released(self) -> list[int]:
        released = self._control.released
        found: list[int] = []
        while released:
            lease = released.popleft()
            if (early := self._early_of.pop(lease, None)) is not None:
                released.append(early)
            for request_id in [name for name, early in self._early.items() if early == lease]:
                del self._early[request_id]
            if lease in self._leases:
                self._counts["leases_released"] += 1
                found += self._leases.pop(lease)
        return found

    @property
    def has_released(self) -> bool:
        return bool(self._control.released)

    def update(self, transfers: FinishedTransfers) -> None:
        for transfer_id in transfers.finished:
            self._ended(transfer_id, None)
        for transfer_id, reason in transfers.failed.items():
            self._ended(transfer_id, reason)

    def _ended(self, transfer_id: int, error: str | None) -> None:
        num_blocks = self._lent_blocks.pop(transfer_id, 0)
        lease = self._lease_of.pop(transfer_id, None)
        if lease is not None:
            if self._leases.pop(lease, None) is not None:
                self._counts["leases_expired"] += 1
                self._early_of.pop(lease, None)
            return
        take = self._take_of.pop(transfer_id, None)
        if take is None:
            return
        take.loading -= 1
        if error is None:
            self._counts["taken_blocks"] += num_blocks
        else:
            take.error = take.error or error
        if take.loading:
            return
        if take.error is None and take.taken.own.early:
            self._counts["early_requests"] += 1
        elif take.error is None:
            self._counts["taken_requests"] += 1
            self._times.append(time.monotonic() - take.began)
        else:
            self._counts["failures"] += 1
            self._say(take.error)
        self._release_if_over(take)

    def _release_if_over(self, take: _Take) -> None:
        if take.is_settled and not take.loading:
            one = take.taken
            self._releases.end(one.host, one.port, one.engine_id, one.own.lease)

    def _say(self, error: str) -> None:
        """Each reason once."""
        if error not in self._said and len(self._said) < 100:
            self._said.add(error)
            logger.warning("Blocks did not come from another engine, and their prompt was computed: %s", error)

    def stats(self) -> dict[str, float]:
        found: dict[str, float] = {f"handover_{name}": float(count) for name, count in self._counts.items()}
        found["handover_leases"] = float(len(self._leases))
        found["handover_lent_blocks"] = float(sum(self._lent_blocks[one] for ids in self._leases.values() for one in ids))
        found["handover_releases_failed"] = float(self._releases.num_failed)
        times = sorted(self._times)
        for quantile in _QUANTILES if times else ():
            found[f"handover_seconds_p{quantile * 100:.0f}"] = times[min(len(times) - 1, int(quantile * len(times)))]
        return found

    def reset(self) -> None:
        """Leases go on: what they lend is as valid as when it was lent."""

    def close(self) -> None:
        self._releases.close()
        self._control.close()
