"""`Connector`: moves the blocks of the KV cache between the device and another place, such as host memory, a file or another engine.

It has two sides. The scheduler's side knows which content is in the other place, and decides what is loaded and stored. The worker's
side, one on each rank, copies the rank's part. `Transfers` (runtime/scheduler/transfers.py) sees to the blocks: it keeps those of a
transfer from being handed out until every rank is through with them.

Without a connector nothing of this exists: that is the default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from compile_and_serve.plugins import declared_plugins, load_plugins
from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory


class ConnectorError(ValueError):
    """There is no such connector, or it cannot be imported. The message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixQuery:
    """A waiting request, as a connector sees it.

    num_cached_tokens: of its prefix on the device. max_tokens: of a prefix that it could use. Both are multiples of `alignment`, as the
    length of every prefix is. keys_at: what a prefix of so many tokens consists of, as keys for each state group.
    """

    request_id: str
    num_cached_tokens: int
    max_tokens: int
    alignment: int
    keys_at: Callable[[int], list[list[bytes]]]


class ContentEvents(Protocol):
    """Who wants to know what can be loaded, and what no longer. medium: one of `runtime/kv_events/wire.py`."""

    def stored_elsewhere(self, keys: Iterable[bytes], medium: str) -> None:
        """Contents can be loaded from there."""

    def removed(self, key: bytes, medium: str) -> None:
        """A content is no longer there."""


class SchedulerConnector(ABC):
    """The scheduler's side. Its methods are called from one thread, while steps are scheduled: none may wait.

    deadline_seconds: a transfer that takes longer counts as failed. Its blocks stay out of use until the workers say that they are through.
    lease_seconds: after which blocks that were lent to another engine are freed, whether it has them or not.
    events: None: nobody wants to know.
    """

    deadline_seconds = 30.0
    lease_seconds = 30.0
    events: ContentEvents | None = None

    @abstractmethod
    def match(self, query: PrefixQuery) -> int:
        """How many tokens more than `num_cached_tokens` can be loaded; 0 for none."""

    def tiers_of(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Of the last match: how many of these keys each tier has. Empty where a connector has no tiers."""
        return {}

    @abstractmethod
    def update(self, transfers: FinishedTransfers) -> None:
        """Transfers have ended: on all ranks, or by the deadline."""

    def evicted(self, key: bytes) -> bool:
        """Cached content is about to be overwritten: whether it shall be stored before."""
        return False

    def finished(self, request_id: str, keys: Sequence[bytes], cached_share: float) -> Collection[bytes]:
        """A request has ended, of which the cache has `keys`: those of them that shall be stored, before their blocks may be evicted.

        cached_share: of the device's blocks, those that hold cached content.
        """
        return ()

    def prepare(self, transfer: BlockTransfer, *, is_load: bool) -> bytes:
        """A transfer will begin: what the worker's side needs beside its keys and blocks."""
        return b""

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """A request has arrived that another engine began, or is to continue. params: as `kv_transfer_params` has them, checked."""
        raise ValueError("This connector hands no requests to other engines: leave out kv_transfer_params.")

    def settled(self, request_id: str) -> None:  # noqa: B027 (most connectors need not know)
        """A request was admitted or has ended, so nothing more will be loaded for it."""

    def lend(self, block_ids: list[list[int]], num_tokens: int) -> None:
        """A request that another engine continues has ended. Its blocks stay until the lease ends: those of each group for its first
        `num_tokens` tokens. Their transfers will be prepared next.
        """
        raise NotImplementedError

    def lends_early(self, request_id: str) -> bool:
        """Whether another engine already fetches the blocks of a request that is being computed for it. Transfers of some will be prepared
        next.
        """
        return False

    def lent_early(self, request_id: str, transfer_ids: list[int]) -> None:
        """What was just prepared after `lends_early`."""
        raise NotImplementedError

    def ended(self, request_id: str) -> None:  # noqa: B027 (most connectors need not know)
        """A request has ended that was to be handed over, and will not be."""

    def lent(
        self, request_id: str, params: Mapping[str, Any], transfer_ids: list[int], token_ids: list[int], logprobs: Any
    ) -> dict[str, Any]:
        """What the other engine must be told, as `kv_transfer_params`. params: with which the request came. transfer_ids: of what was just
        lent; none: nothing was. token_ids: that were sampled, with their `logprobs`.
        """
        raise NotImplementedError

    def take_released(self) -> list[int]:
        """Transfers of leases that the other engine has ended since the last call."""
        return []

    @property
    def has_released(self) -> bool:
        """Whether `take_released` has something."""
        return False

    def close(self) -> None:  # noqa: B027 (most connectors have nothing to stop)
        """The engine stops."""

    def observe_step(self, num_prompt_tokens: int, seconds: float) -> None:  # noqa: B027 (most connectors need not know)
        """A step has ended, which computed so many tokens of prompts. seconds: 0.0 if unknown."""

    def stats(self) -> dict[str, float]:
        """For /metrics, by name. Counters since the start, and quantiles of seconds."""
        return {}

    @abstractmethod
    def reset(self) -> None:
        """What is cached and stored is no longer valid: forget it."""


class WorkerConnector(ABC):
    """A rank's side. All methods are called from one thread, `poll` after each step.

    is_polled_often: `poll` costs nothing, so that it may be called at more moments.
    """

    is_polled_often = False

    @abstractmethod
    def bind(self, memory: PageMemory) -> None:
        """The cache is allocated: transfers read and write this memory."""

    @abstractmethod
    def start(self, transfers: StepTransfers) -> None:
        """Begin transfers. Does not wait for them."""

    @abstractmethod
    def poll(self) -> FinishedTransfers:
        """Transfers that have ended since the last call. Does not wait. Each that was begun is named once."""

    @abstractmethod
    def close(self) -> None:
        """Stop all transfers and let go of the memory. Waits until nothing touches it. `bind` may follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Connector:
    """Both sides of a kind of connector, each made in the process where it is needed. Both get the bytes of a block on a rank, too."""

    scheduler_side: Callable[[EngineConfig, int], SchedulerConnector]
    worker_side: Callable[[EngineConfig, Rank, int], WorkerConnector]


def connector_of(name: str) -> Connector:
    """The plug-in of this name in `compile_and_serve.connectors`, or `package.module:attribute`. Raises `ConnectorError`, `PluginError`."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except Exception as error:  # the user's module may raise anything
            raise ConnectorError(f"The connector {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    else:
        names = declared_plugins("connectors")
        if name not in names:
            expected = ", ".join([*sorted(names), "package.module:attribute"])
            raise ConnectorError(f"There is no connector {name!r}: expected {expected}.")
        found = load_plugins("connectors")[name]
    if not isinstance(found, Connector):
        raise ConnectorError(f"{name} is no connector: it must be an instance of compile_and_serve.runtime.connector.connector.Connector.")
    return found
