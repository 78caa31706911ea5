"""`HostRanks`: ranks on several hosts, without Ray. The engine runs on host 0; on each other host an agent (`host_agent.py`) runs ranks.

All hosts have one secret, from a file. CURVE keys follow from it: the sockets between hosts are encrypted, and only those that have the
secret can connect. They are bound to one address, `master_addr`. The collectives' own connections have no keys: use a network that nobody
else can reach.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from compile_and_serve.runtime.child_process import LINGER_MS, one_device
from compile_and_serve.runtime.config import EngineConfig, ParallelConfig
from compile_and_serve.runtime.distributed.local_ranks import LocalRanks
from compile_and_serve.runtime.distributed.rank_process import RankBootstrap
from compile_and_serve.runtime.distributed.socket_keys import EngineKeys

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5  # between two messages of a host to the other
SILENT_SECONDS = 5.0  # after which a host is taken to be gone
JOIN_SECONDS = 600.0  # in which all hosts have to join
MIN_SECRET_BYTES = 16
_LOG_SECONDS = 30.0
_STOP_SECONDS = 3.0  # beyond the time that the ranks get to end
_SIOCGIFADDR = 0x8915


class HostReport(msgspec.Struct, tag="report"):
    """A host lives. num_hosts: as it was told. engine: whose ranks it runs; "": none. ended: its ranks that have ended, and how.
    has_stopped: it has ended its ranks because it was told so, and says no more.
    """

    host: int
    num_hosts: int
    address: str
    engine: str
    ended: dict[int, str] = {}
    has_stopped: bool = False


class LaunchRanks(msgspec.Struct, tag="launch"):
    """Start these ranks. bootstraps: a pickled list of `RankBootstrap`."""

    engine: str
    bootstraps: bytes


class EngineLives(msgspec.Struct, tag="lives"):
    """The engine lives."""

    engine: str


class StopHost(msgspec.Struct, tag="stop"):
    """The engine ends. seconds: in which the ranks may end by themselves. refusal: why the host was not wanted; "": it was."""

    seconds: float = 0.0
    refusal: str = ""


ToHost = LaunchRanks | EngineLives | StopHost


def read_keys(parallel: ParallelConfig) -> EngineKeys:
    """The keys that follow from the hosts' secret. Raises `ValueError` with one sentence for a missing or short one."""
    path = parallel.master_key_file
    if path is None:
        raise ValueError("Several hosts need a secret that they share: give all of them --master-key-file FILE, with the same content.")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--master-key-file {path} cannot be read: {error.strerror}.") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"--master-key-file {path} holds {len(secret)} bytes: write at least {MIN_SECRET_BYTES} random ones into it.")
    return EngineKeys.of_secret(secret)


def resolve_address(name: str) -> str:
    """The IPv4 address of a host. Raises `ValueError` with one sentence."""
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(f"--master-addr {name} cannot be resolved: {error}.") from None


def own_address(towards: str) -> str:
    """This host's address on the way to another host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 1))
        except OSError as error:
            raise ValueError(f"--master-addr {towards} cannot be reached from here: {error.strerror}.") from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this host; None if none is found."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def collectives_environment(address: str) -> dict[str, str]:
    """Environment variables with which gloo and NCCL listen on the interface of an address, and nowhere else."""
    name = interface_of(address)
    return {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


@dataclass(slots=True)
class _Host:
    """What is known of another host. lost: a predicate once it is gone. has_stopped: it needs no more to be told so."""

    identity: bytes
    address: str
    heard_at: float
    ended: dict[int, str] = field(default_factory=dict)
    lost: str | None = None
    has_stopped: bool = False


class HostRanks:
    """A `RankHost` over several hosts, of which this one is host 0. Each has as many ranks, one after another.

    Construction raises `ValueError` with one sentence, also if the hosts have not all joined in time.
    """

    cause_seconds = SILENT_SECONDS + 2 * REPORT_SECONDS  # a rank may fail before it is known that another's host is gone

    def __init__(self, config: EngineConfig, *, join_seconds: float = JOIN_SECONDS) -> None:
        parallel = config.parallel
        self._device, self._num_hosts, self._join_seconds = config.device, parallel.num_hosts, join_seconds
        self._per_host = config.mesh.size // parallel.num_hosts
        self._size = config.mesh.size
        self._address = resolve_address(parallel.master_addr)
        self.keys: EngineKeys | None = read_keys(parallel)
        self._own = LocalRanks(config.device, 0, config.compile.work_dir, environment=collectives_environment(self._address))
        with socket.socket() as probe:
            try:
                probe.bind((self._address, 0))
            except OSError as error:
                raise ValueError(f"--master-addr {parallel.master_addr} is no address of this host ({error.strerror}).") from None
            self.rendezvous = f"tcp://{self._address}:{probe.getsockname()[1]}"
        self._link = _HostLink(parallel, self._address, self._per_host)

    def address(self, name: str) -> str:
        """A free TCP port of the master address."""
        return f"tcp://{self._address}:*"

    def device_index(self, rank: int) -> int:
        """A rank sees only its own CUDA device, which is device 0 there."""
        return one_device(rank % self._per_host, self._device)[1]

    def num_sharing(self, rank: int, config: EngineConfig) -> int:
        """As many ranks as a host has."""
        return self._per_host

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        """Wait until all hosts have joined, and start the ranks."""
        self._link.wait_for_all(self._join_seconds)
        self._own.launch(bootstraps[: self._per_host])
        for host in range(1, self._num_hosts):
            self._link.launch(host, bootstraps[host * self._per_host : (host + 1) * self._per_host])

    def ended(self) -> dict[int, str]:
        """The ranks that have ended, or whose host is gone."""
        return self._own.ended() | self._link.ended()

    def stop(self, seconds: float) -> None:
        """Wait `seconds` for the ranks to end, then kill the rest. May be called more than once."""
        self._link.stop(seconds)
        self._own.stop(seconds)


class _HostLink:
    """Talks to the other hosts' agents, from a thread of its own."""

    def __init__(self, parallel: ParallelConfig, address: str, per_host: int) -> None:
        self._engine = uuid.uuid4().hex
        self._num_hosts, self._per_host = parallel.num_hosts, per_host
        self._hosts: dict[int, _Host] = {}
        self._lock = threading.Condition()
        self._orders: queue.SimpleQueue[tuple[int, ToHost]] = queue.SimpleQueue()
        self._stop: StopHost | None = None  # what all hosts are told now
        self._stop_until = 0.0
        self._where = f"tcp://{address}:{parallel.master_port}"
        self._keys = read_keys(parallel)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys.admit_ranks_only(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._keys.protect(self._socket)
        try:
            self._socket.bind(self._where)
        except zmq.ZMQError as error:
            self._keys.close()
            self._context.destroy(linger=0)
            raise ValueError(f"The hosts cannot meet at {self._where} ({error}): give another --master-port.") from None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(HostReport)
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def wait_for_all(self, seconds: float) -> None:
        """Raises `ValueError` if a host has not joined within so many seconds."""
        deadline, next_log = time.monotonic() + seconds, time.monotonic()
        with self._lock:
            while missing := [host for host in range(1, self._num_hosts) if host not in self._hosts]:
                now = time.monotonic()
                names = f"Host{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self._num_hosts}"
                if now > deadline:
                    raise ValueError(
                        f"{names} did not join at {self._where} within {seconds:g} seconds: start each with --headless --node-rank N and "
                        "the same --master-key-file."
                    )
                if now >= next_log:
                    logger.info("Waiting for %s at %s.", names.lower(), self._where)
                    next_log = now + _LOG_SECONDS
                self._lock.wait(REPORT_SECONDS)

    def launch(self, host: int, bootstraps: Sequence[RankBootstrap]) -> None:
        self._orders.put((host, LaunchRanks(self._engine, pickle.dumps(list(bootstraps)))))

    def ended(self) -> dict[int, str]:
        ended: dict[int, str] = {}
        with self._lock:
            for number, host in self._hosts.items():
                ended |= host.ended
                if host.lost is not None:
                    name = f"was lost with host {number} of {self._num_hosts} ({host.address}), which {host.lost}"
                    ended |= dict.fromkeys(range(number * self._per_host, (number + 1) * self._per_host), name)
        return ended

    def stop(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._stop_until = time.monotonic() + seconds + _STOP_SECONDS
            self._stop = StopHost(seconds)
            self._thread.join()

    def _is_over(self) -> bool:
        """Whether all hosts have stopped, or had the time to."""
        if self._stop is None:
            return False
        return time.monotonic() > self._stop_until or all(one.has_stopped or one.lost is not None for one in self._hosts.values())

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        next_report = 0.0
        while not self._is_over():
            if poller.poll(50):
                identity, data = self._socket.recv_multipart()
                self._take(identity, self._decoder.decode(data))
            while not self._orders.empty():
                host, order = self._orders.get()
                self._send(self._hosts[host].identity, order)
            now = time.monotonic()
            if now >= next_report:
                next_report = now + REPORT_SECONDS
                with self._lock:
                    for one in self._hosts.values():
                        self._send(one.identity, self._stop or EngineLives(self._engine))
                        if one.lost is None and now > one.heard_at + SILENT_SECONDS:
                            one.lost = f"has sent nothing for {SILENT_SECONDS:g} seconds"
        self._socket.close()
        self._keys.close()
        self._context.term()

    def _take(self, identity: bytes, report: HostReport) -> None:
        if report.num_hosts != self._num_hosts or not 0 < report.host < self._num_hosts:
            wrong = f"it is host {report.host} of {report.num_hosts}, but there are {self._num_hosts}"
            self._send(identity, StopHost(refusal=f"The engine's host refuses this one: {wrong}. Give all the same --nnodes."))
            return
        with self._lock:
            known = self._hosts.get(report.host)
            if known is not None and known.identity != identity:
                if known.heard_at + SILENT_SECONDS > time.monotonic() and known.lost is None:
                    # One that was started again does not know the ranks that it had.
                    known.lost = "has been started again"
                return
            if known is None:
                if report.engine:
                    return  # it is about to stop the ranks of an earlier engine
                known = self._hosts[report.host] = _Host(identity, report.address, time.monotonic())
                logger.info("Host %d of %d joined from %s.", report.host, self._num_hosts, report.address)
                self._lock.notify_all()
            known.heard_at, known.has_stopped = time.monotonic(), report.has_stopped
            if report.engine == self._engine:
                known.ended = dict(report.ended)

    def _send(self, identity: bytes, order: ToHost) -> None:
        self._socket.send_multipart([identity, self._encoder.encode(order)])
