"""Which connector the options ask for."""

from __future__ import annotations

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.connector import Connector, connector_of
from compile_and_serve.runtime.connector.handover.handover import HANDOVER
from compile_and_serve.runtime.connector.tiers.mooncake import MOONCAKE
from compile_and_serve.runtime.connector.tiers.tiers import TIERS


def configured_connector(config: EngineConfig) -> Connector | None:
    """None: nothing is loaded or stored. Raises `ConnectorError`, `PluginError`."""
    cache = config.cache
    if config.kv_transfer is not None:
        return HANDOVER
    if cache.connector == "mooncake":
        return MOONCAKE
    if cache.connector is not None:
        return connector_of(cache.connector)
    return None if cache.offloading_bytes is None and cache.offload_dir is None else TIERS
