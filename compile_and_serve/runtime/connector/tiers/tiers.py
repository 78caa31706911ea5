"""The tiers as a connector: `--kv-offloading-size` and `--kv-offload-dir`."""

from __future__ import annotations

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.connector import Connector, ConnectorError, SchedulerConnector, WorkerConnector
from compile_and_serve.runtime.connector.tiers.disk_folder import DiskFolder
from compile_and_serve.runtime.connector.tiers.fingerprint import fingerprint
from compile_and_serve.runtime.connector.tiers.host_pages import HostPages
from compile_and_serve.runtime.connector.tiers.orders import host_page_bytes, num_host_pages
from compile_and_serve.runtime.connector.tiers.tier_index import TierIndex


def _scheduler_side(config: EngineConfig, page_bytes: int) -> SchedulerConnector:
    return TierIndex(HostPages(num_host_pages(config, page_bytes)), _disk(config, 0, page_bytes), page_bytes * config.mesh.size)


def _worker_side(config: EngineConfig, rank: Rank, page_bytes: int) -> WorkerConnector:
    from compile_and_serve.runtime.connector.tiers.tier_copies import TierCopies  # imports torch

    disk = _disk(config, rank.index, page_bytes)
    return TierCopies(num_host_pages(config, page_bytes), host_page_bytes(page_bytes), disk)


def _disk(config: EngineConfig, rank: int, page_bytes: int) -> DiskFolder | None:
    folder = config.cache.offload_dir
    if folder is None:
        return None
    try:
        return DiskFolder(folder, fingerprint(config, page_bytes), rank, config.cache.offload_dir_bytes)
    except OSError as error:
        raise ConnectorError(f"--kv-offload-dir {folder} cannot be used: {error.strerror or error}.") from error


TIERS = Connector(scheduler_side=_scheduler_side, worker_side=_worker_side)
