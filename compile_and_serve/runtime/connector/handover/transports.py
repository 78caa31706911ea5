"""Which ways to read other engines' memory there are here."""

from __future__ import annotations

import logging

from compile_and_serve.runtime.connector.connector import ConnectorError
from compile_and_serve.runtime.connector.handover.cuda_ipc import CudaIpc
from compile_and_serve.runtime.connector.handover.direct import CannotReadDirectlyError, DirectTransport
from compile_and_serve.runtime.connector.handover.nixl import Nixl, nixl_library
from compile_and_serve.runtime.connector.handover.pages import PageBytes
from compile_and_serve.runtime.kv_config import KVTransferConfig

logger = logging.getLogger(__name__)


def direct_transports(config: KVTransferConfig, pages: PageBytes) -> list[DirectTransport]:
    """The ways that the options and this machine allow, the fastest first. Raises `ConnectorError` if the one asked for is not there."""
    wanted, found = config.transport, list[DirectTransport]()
    on_cuda = not pages.platform.shares_host_memory
    if wanted == "cuda_ipc" and not on_cuda:
        raise ConnectorError("kv_transfer_config: kv_connector cuda_ipc needs a CUDA device: use auto or socket.")
    if wanted in ("auto", "cuda_ipc") and on_cuda:
        found.append(CudaIpc(pages))
    if wanted == "nixl" or (wanted == "auto" and on_cuda):
        library = nixl_library()
        if library is None and wanted == "nixl":
            raise ConnectorError("kv_transfer_config: kv_connector nixl needs the package nixl: install compile-and-serve[nixl].")
        if library is not None:
            try:
                found.append(Nixl(pages, library))
            except CannotReadDirectlyError as error:
                if wanted == "nixl":
                    raise ConnectorError(f"kv_transfer_config: {error}") from error
                logger.warning("Blocks do not go over nixl: %s", error)
    return found
