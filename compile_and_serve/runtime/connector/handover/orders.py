"""What the scheduler's side of a handover tells the ranks' side of a transfer (`BlockTransfer.meta`)."""

from __future__ import annotations

import msgspec


class LendOrders(msgspec.Struct, tag="lend"):
    """Let another engine fetch the blocks until the transfer is cancelled."""

    lease: str


class FetchOrders(msgspec.Struct, tag="fetch"):
    """Fetch the blocks from the engine whose control socket is there. waits: some may not be computed yet."""

    engine_id: str
    host: str
    port: int
    lease: str
    waits: bool = False


Orders = LendOrders | FetchOrders
decode_orders = msgspec.msgpack.Decoder(Orders).decode
encode_orders = msgspec.msgpack.Encoder().encode
