"""The handover as a connector: `--kv-transfer-config`."""

from __future__ import annotations

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.connector import Connector, ConnectorError, SchedulerConnector, WorkerConnector
from compile_and_serve.runtime.connector.handover.config import of_replica
from compile_and_serve.runtime.connector.handover.index import HandoverIndex


def _scheduler_side(config: EngineConfig, page_bytes: int) -> SchedulerConnector:
    assert config.kv_transfer is not None
    try:
        return HandoverIndex(config.kv_transfer, config.parallel.data_parallel_rank, config.mesh.tensor)
    except ValueError as error:
        raise ConnectorError(str(error)) from error


def _worker_side(config: EngineConfig, rank: Rank, page_bytes: int) -> WorkerConnector:
    from compile_and_serve.runtime.connector.handover.copies import HandoverCopies  # imports torch

    transfer = config.kv_transfer
    assert transfer is not None
    _, port = of_replica(transfer, config.parallel.data_parallel_rank)
    return HandoverCopies(transfer, (transfer.host, port), rank.coordinates["tensor"], config.mesh.tensor)


HANDOVER = Connector(scheduler_side=_scheduler_side, worker_side=_worker_side)
