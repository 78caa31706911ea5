"""A Mooncake store as a tier: `kv_connector="mooncake"`. Its address comes from where Mooncake's own tools have it: the file that
`MOONCAKE_CONFIG_PATH` names, or `MOONCAKE_MASTER` and its like.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.connector import Connector, ConnectorError, SchedulerConnector, WorkerConnector
from compile_and_serve.runtime.connector.tiers.fingerprint import fingerprint
from compile_and_serve.runtime.connector.tiers.host_pages import HostPages
from compile_and_serve.runtime.connector.tiers.mooncake_store import MooncakeStore, ObjectStore
from compile_and_serve.runtime.connector.tiers.orders import host_page_bytes, num_host_pages
from compile_and_serve.runtime.connector.tiers.tier_index import TierIndex


@cache
def _connect(*, lends_memory: bool) -> ObjectStore:
    """This process's client. lends_memory: whether the store may keep objects here. Raises `ConnectorError`."""
    try:
        options = import_module("mooncake.mooncake_config").MooncakeConfig
        store = import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise ConnectorError(f"kv_connector mooncake needs the package mooncake-transfer-engine and its libraries: {error}.") from error
    try:
        found = options.load_from_env()
    except (OSError, ValueError) as error:
        raise ConnectorError(f"kv_connector mooncake needs the address of a store: set MOONCAKE_CONFIG_PATH ({error}).") from error
    status = store.setup(
        found.local_hostname,
        found.metadata_server,
        found.global_segment_size if lends_memory else 0,
        found.local_buffer_size,
        found.protocol,
        found.device_name or "",
        found.master_server_address,
    )
    if status != 0:
        raise ConnectorError(f"The Mooncake store at {found.master_server_address} cannot be used: error {status}.")
    client: ObjectStore = store
    return client


def _scheduler_side(config: EngineConfig, page_bytes: int) -> SchedulerConnector:
    store = MooncakeStore(_connect(lends_memory=config.mesh.size == 1), fingerprint(config, page_bytes), 0, config.mesh.size)
    return TierIndex(HostPages(num_host_pages(config, page_bytes)), store, page_bytes * config.mesh.size)


def _worker_side(config: EngineConfig, rank: Rank, page_bytes: int) -> WorkerConnector:
    from compile_and_serve.runtime.connector.tiers.tier_copies import TierCopies  # imports torch

    store = MooncakeStore(_connect(lends_memory=True), fingerprint(config, page_bytes), rank.index, config.mesh.size)
    return TierCopies(num_host_pages(config, page_bytes), host_page_bytes(page_bytes), store)


MOONCAKE = Connector(scheduler_side=_scheduler_side, worker_side=_worker_side)
