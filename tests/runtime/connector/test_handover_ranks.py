"""The ranks' side of a handover: every number of ranks on both sides, every way in which bytes come, and what happens when one dies."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.connector.handover import direct
from compile_and_serve.runtime.connector.handover.control import ControlServer
from compile_and_serve.runtime.connector.handover.copies import HandoverCopies
from compile_and_serve.runtime.connector.handover.cuda_ipc import CannotReadDirectlyError, CudaIpc
from compile_and_serve.runtime.connector.handover.nixl import Nixl
from compile_and_serve.runtime.connector.handover.orders import FetchOrders, LendOrders, encode_orders
from compile_and_serve.runtime.connector.handover.pages import plan_pulls
from compile_and_serve.runtime.connector.handover.wire import GroupInfo, RankInfo, TransferError
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory, PagePiece
from compile_and_serve.runtime.kv_config import KVTransferConfig
from tests.support.processes import wait_until

PAGES, HEADS, HEAD_BYTES, LATENT_BYTES = 12, 4, 6, 10


def memory_of(whole: np.ndarray, latent: np.ndarray, rank: int, num_ranks: int) -> PageMemory:
    """What one rank keeps of [N, 2, heads, bytes] and [N, bytes]."""
    kept = max(1, HEADS // num_ranks)
    first = rank * HEADS // num_ranks
    own = whole[:, :, first : first + kept].reshape(PAGES, -1)
    pieces = [PagePiece(0, 2, kept, HEADS, HEAD_BYTES), PagePiece(own.shape[1], 1, 1, 1, LATENT_BYTES)]
    parts = [torch.from_numpy(np.concatenate([own, latent], 1).copy())]
    return PageMemory(parts=[parts], pieces=[pieces])


class Engine:
    """The ranks of an engine, and its control socket."""

    def __init__(self, num_ranks: int, *, content: int | None = None, **options: Any) -> None:
        random = np.random.default_rng(content or 0)
        self.whole = random.integers(0, 255, (PAGES, 2, HEADS, HEAD_BYTES), dtype=np.uint8)
        self.latent = random.integers(0, 255, (PAGES, LATENT_BYTES), dtype=np.uint8)
        if content is None:
            self.whole[:], self.latent[:] = 0, 0
        self.config = KVTransferConfig(engine_id="engine", secret="secret", load_seconds=1.0, **options)
        self.control = ControlServer("127.0.0.1", 0, engine_id="engine", secret="secret", num_ranks=num_ranks)
        self.address = "127.0.0.1", self.control._listener.port
        self.memories = [memory_of(self.whole, self.latent, rank, num_ranks) for rank in range(num_ranks)]
        self.ranks = [HandoverCopies(self.config, self.address, rank, num_ranks) for rank in range(num_ranks)]
        for rank, memory in zip(self.ranks, self.memories, strict=True):
            rank.bind(memory)

    def lend(self, keys: Sequence[bytes], pages: Sequence[int], transfer_id: int = 1) -> None:
        meta = encode_orders(LendOrders("lease"))
        for rank in self.ranks:
            rank.start(
                StepTransfers(stores=[BlockTransfer(transfer_id=transfer_id, group=0, keys=list(keys), block_ids=list(pages), meta=meta)])
            )

    def fetch(self, other: Engine, keys: Sequence[bytes], pages: Sequence[int], lease: str = "lease") -> list[FinishedTransfers]:
        meta = encode_orders(FetchOrders("engine", *other.address, lease))
        for rank in self.ranks:
            rank.start(StepTransfers(loads=[BlockTransfer(transfer_id=7, group=0, keys=list(keys), block_ids=list(pages), meta=meta)]))
        return [poll(rank) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.control.close()


def poll(rank: HandoverCopies) -> FinishedTransfers:
    ended = FinishedTransfers()

    def has_ended() -> bool:
        nonlocal ended
        ended = rank.poll()
        return bool(ended.finished or ended.failed)

    wait_until(has_ended, 10)
    return ended


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


KEYS, THEIRS, MINE = [b"a", b"b", b"c"], [5, 6, 2], [8, 9, 1]


@pytest.mark.parametrize("ranks", list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8))))
def test_heads_are_regrouped(engines: list[Engine], ranks: tuple[int, int]) -> None:
    """8 ranks are more than there are heads: each head is kept twice."""
    giver, taker = Engine(ranks[0], content=3), Engine(ranks[1])
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    assert [ended.finished for ended in taker.fetch(giver, KEYS, MINE)] == [[7]] * ranks[1]
    taker.whole[MINE], taker.latent[MINE] = giver.whole[THEIRS], giver.latent[THEIRS]
    for rank, memory in enumerate(taker.memories):
        expected = memory_of(taker.whole, taker.latent, rank, ranks[1])
        assert torch.equal(memory.parts[0][0], expected.parts[0][0])


def test_layouts_that_do_not_fit_are_refused() -> None:
    def rank(number: int, count: int, pieces: list[PagePiece] | None) -> RankInfo:
        return RankInfo(number, count, "", 0, "", [GroupInfo(100 // count, pieces)])

    with pytest.raises(TransferError, match="only be handed over between engines with as many ranks"):
        plan_pulls(0, rank(0, 1, None), [rank(0, 2, None), rank(1, 2, None)])
    other = [PagePiece(0, 2, 2, 4, 99)]
    with pytest.raises(TransferError, match="laid out in another way"):
        plan_pulls(0, rank(0, 1, [PagePiece(0, 2, 4, 4, HEAD_BYTES)]), [rank(0, 2, other), rank(1, 2, other)])


def test_a_lease_that_has_ended_and_keys_that_were_not_lent_are_refused(engines: list[Engine]) -> None:
    giver, taker = Engine(1, content=3), Engine(1)
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    [ended] = taker.fetch(giver, [b"x"], [0])
    assert "another prompt, salt or adapter" in ended.failed[7]
    [ended] = taker.fetch(giver, KEYS, MINE, lease="guessed")
    assert ended.failed == {7: "The lease has ended."}
    giver.ranks[0].start(StepTransfers(cancelled=[1]))
    assert giver.ranks[0].poll().finished == [1]
    [ended] = taker.fetch(giver, KEYS, MINE)
    assert ended.failed == {7: "The lease has ended."}
    assert not taker.memories[0].parts[0][0].any()


def test_an_engine_that_dies_while_it_sends_is_an_error(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = Engine(1, content=3), Engine(1)
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)

    def die(lender: Any, *_: object) -> None:
        lender._listener.close()

    monkeypatch.setattr("compile_and_serve.runtime.connector.handover.lender.Lender._send", die)
    [ended] = taker.fetch(giver, KEYS, MINE)
    assert "connection" in ended.failed[7]


class FakeDriver:
    """Of CUDA: memory is the host's."""

    def allocation_of(self, address: int) -> int:
        return address - 64

    def handle_of(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        pass

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        ctypes.memmove(to, source, num_bytes)


class FakeAgent:
    """Of NIXL: all agents share the host's memory. Transfers end at the second look."""

    def __init__(self, name: str) -> None:
        self.name, self.state = name, "PROC"

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> str:
        assert kind == "DRAM"
        return "registered"

    def deregister_memory(self, registered: str) -> None:
        assert registered == "registered"

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        pass

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return regions

    def initialize_xfer(self, way: str, mine: Any, theirs: Any, name: str, message: bytes) -> Any:
        assert way == "READ"
        return mine, theirs

    def transfer(self, handle: Any) -> str:
        for (to, size, _), (source, other_size, _) in zip(*handle, strict=True):
            assert size == other_size
            ctypes.memmove(to, source, size)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def release_xfer_handle(self, handle: Any) -> None:
        pass


class FakeNixl:
    state = "DONE"

    def nixl_agent(self, name: str) -> FakeAgent:
        agent = FakeAgent(name)
        agent.state = self.state
        return agent


@pytest.mark.parametrize("way", ["cuda_ipc", "nixl"])
def test_memory_that_is_read_directly(engines: list[Engine], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def transports(config: object, pages: Any) -> list[direct.DirectTransport]:
        return [CudaIpc(pages, FakeDriver()) if way == "cuda_ipc" else Nixl(pages, FakeNixl())]  # type: ignore[arg-type]

    monkeypatch.setattr("compile_and_serve.runtime.connector.handover.copies.direct_transports", transports)
    monkeypatch.setattr("compile_and_serve.runtime.connector.handover.pages.PageBytes.write", None)  # nothing goes through the host
    giver, taker = Engine(1, content=3), Engine(1)
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    [ended] = taker.fetch(giver, KEYS, MINE)
    assert ended.finished == [7]
    assert torch.equal(taker.memories[0].parts[0][0][MINE], giver.memories[0].parts[0][0][THEIRS])
    giver.ranks[0].start(StepTransfers(cancelled=[1]))
    assert poll(giver.ranks[0]).finished == [1]


def test_what_cannot_be_opened_goes_through_sockets(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(CudaIpc):
        def open(self, description: bytes) -> Any:
            raise CannotReadDirectlyError("No peer access.")

    monkeypatch.setattr(
        "compile_and_serve.runtime.connector.handover.copies.direct_transports",
        lambda config, pages: [Broken(pages, FakeDriver())],  # type: ignore[arg-type]
    )
    giver, taker = Engine(1, content=3), Engine(1)
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    for _ in range(2):
        assert [ended.finished for ended in taker.fetch(giver, KEYS, MINE)] == [[7]]
    assert caplog.text.count("No peer access.") == 1


def test_a_nixl_transfer_that_fails_is_an_error(engines: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNixl()
    library.state = "ERR"
    monkeypatch.setattr(
        "compile_and_serve.runtime.connector.handover.copies.direct_transports", lambda config, pages: [Nixl(pages, library)]
    )
    giver, taker = Engine(1, content=3), Engine(1)
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    [ended] = taker.fetch(giver, KEYS, MINE)
    assert ended.failed == {7: "NIXL could not read from the other engine: the transfer ended as ERR."}


def test_the_real_nixl(engines: list[Engine]) -> None:
    pytest.importorskip("nixl._api")
    giver, taker = Engine(1, content=3, transport="nixl"), Engine(1, transport="nixl")
    engines += [giver, taker]
    giver.lend(KEYS, THEIRS)
    [ended] = taker.fetch(giver, KEYS, MINE)
    assert ended.finished == [7]
    assert torch.equal(taker.memories[0].parts[0][0][MINE], giver.memories[0].parts[0][0][THEIRS])
