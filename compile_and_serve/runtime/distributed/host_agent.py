"""A host without a server (`serve --headless`): it runs the ranks that the engine on host 0 asks it for (`hosts.py`).

It waits for the engine as long as it takes. When the engine is gone without a word, it ends its ranks and waits for the next engine.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import time
import uuid

import msgspec
import zmq

from compile_and_serve.runtime.child_process import LINGER_MS
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.hosts import (
    REPORT_SECONDS,
    SILENT_SECONDS,
    EngineLives,
    HostReport,
    LaunchRanks,
    StopHost,
    ToHost,
    collectives_environment,
    own_address,
    read_keys,
    resolve_address,
)
from compile_and_serve.runtime.distributed.local_ranks import LocalRanks

logger = logging.getLogger(__name__)


def run_host(config: EngineConfig) -> int:
    """Run ranks until the engine ends, or SIGINT or SIGTERM comes. → the exit code

    Raises `ValueError` with one sentence if the engine's host does not want this one.
    """
    agent = _HostAgent(config)
    before = {number: signal.signal(number, agent.end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return agent.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _HostAgent:
    def __init__(self, config: EngineConfig) -> None:
        parallel = config.parallel
        self._config, self._host, self._num_hosts = config, parallel.host_rank, parallel.num_hosts
        master = resolve_address(parallel.master_addr)
        self._address = own_address(master)
        self._where = f"tcp://{master}:{parallel.master_port}"
        self._keys = read_keys(parallel)
        self._engine = ""
        self._ranks: LocalRanks | None = None
        self._first_rank = self._host * (config.mesh.size // self._num_hosts)
        self._heard_at = 0.0
        self._is_ending = self._is_told = False
        self._encoder = msgspec.msgpack.Encoder()

    def end(self, *_: object) -> None:
        """A signal handler."""
        self._is_ending = True

    def run(self) -> int:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.IDENTITY, uuid.uuid4().bytes)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.IMMEDIATE, 1)  # reports are worth nothing later
        self._keys.ranks.protect(link)
        link.connect(self._where)
        logger.info("Host %d of %d (%s) waits for the engine at %s.", self._host, self._num_hosts, self._address, self._where)
        decoder = msgspec.msgpack.Decoder(ToHost)
        next_report = 0.0
        try:
            while not self._is_ending:
                if link.poll(100):
                    order = decoder.decode(link.recv())
                    if isinstance(order, StopHost):
                        if order.refusal:
                            raise ValueError(order.refusal)
                        self._end_ranks(order.seconds)
                        logger.info("The engine has ended.")
                        self._report(link, has_stopped=True)
                        return 0
                    self._take(order)
                now = time.monotonic()
                if self._engine and now > self._heard_at + SILENT_SECONDS:
                    logger.error(
                        "Host 0 of %d (%s) has sent nothing for %g seconds: its ranks here are ended, and this host waits for the next "
                        "engine.",
                        self._num_hosts,
                        self._where,
                        SILENT_SECONDS,
                    )
                    self._end_ranks(0.0)
                if now >= next_report:
                    next_report = now + REPORT_SECONDS
                    self._report(link)
            return 0
        finally:
            self._end_ranks(0.0)
            context.destroy(linger=LINGER_MS if self._is_told else 0)

    def _report(self, link: zmq.Socket[bytes], *, has_stopped: bool = False) -> None:
        ended = {} if self._ranks is None else self._ranks.ended()
        report = HostReport(self._host, self._num_hosts, self._address, self._engine, ended, has_stopped)
        self._is_told = has_stopped
        with contextlib.suppress(zmq.Again):  # there is no engine
            link.send(self._encoder.encode(report), zmq.DONTWAIT)

    def _take(self, order: LaunchRanks | EngineLives) -> None:
        if self._engine and order.engine != self._engine:
            logger.error("Host 0 of %d has been started again: its earlier ranks here are ended.", self._num_hosts)
            self._end_ranks(0.0)
        self._heard_at = time.monotonic()
        if isinstance(order, LaunchRanks):
            config = self._config
            environment = collectives_environment(self._address)
            self._ranks = LocalRanks(config.device, 0, config.compile.work_dir, environment=environment, first_rank=self._first_rank)
            self._engine = order.engine
            self._ranks.launch(pickle.loads(order.bootstraps))

    def _end_ranks(self, seconds: float) -> None:
        if self._ranks is not None:
            self._ranks.stop(seconds)
        self._ranks, self._engine = None, ""
