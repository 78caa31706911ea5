"""What the scheduler's side of the tiers tells the worker's side of a transfer (`BlockTransfer.meta`)."""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.connector import ConnectorError

GIB = 1 << 30
ALIGNMENT = 4096  # bytes of a host page are a multiple: direct reads land there
STAGING_BYTES = GIB  # host memory of a folder alone, through which all goes


class TierOrders(msgspec.Struct, array_like=True):
    """host_pages: where each block of the transfer lies, in its order. from_disk: for each key of a load, whether its file is read first.
    to_disk: whether what is stored is written to files, too. epoch: stands behind the keys of files.
    """

    host_pages: list[int]
    from_disk: list[bool] = []
    to_disk: bool = False
    epoch: bytes = b""


def host_page_bytes(page_bytes: int) -> int:
    """Bytes that a page of the device takes on the host."""
    return -(-page_bytes // ALIGNMENT) * ALIGNMENT


def num_host_pages(config: EngineConfig, page_bytes: int) -> int:
    """Pages of a rank in the host's memory. page_bytes: of a page on the device. Raises `ConnectorError` if not one has room."""
    size = config.cache.offloading_bytes
    total = STAGING_BYTES * config.num_processes if size is None else size
    num_pages = total // config.num_processes // host_page_bytes(page_bytes)
    if num_pages < 1:
        raise ConnectorError(f"--kv-offloading-size has no room for a block of {page_bytes} bytes on each rank: raise it.")
    return num_pages
