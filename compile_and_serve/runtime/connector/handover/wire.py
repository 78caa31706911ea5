"""What two engines say to each other over sockets: messages of msgpack behind their length, and bytes of pages behind some of them.

An engine process has a control socket: its own ranks announce themselves there (`Announce`), other engines ask for the ranks (`Ask`) and
end leases (`Release`). A rank has a socket for blocks: another engine's rank asks for those of some keys (`Pull`), and gets their bytes
behind `Granted`, in the socket or in memory that both map; or it reads the rank's memory itself, and says when it is through (`Done`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct

import msgspec

from compile_and_serve.runtime.connector.page_memory import PagePiece

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20
MAX_CHUNK_BYTES = 8 << 20  # of pages, that are gathered before they are sent


class GroupInfo(msgspec.Struct, array_like=True, frozen=True):
    """The pages of a state group on a rank. pieces: None: it is not known what they hold, so that only equal ranks understand them."""

    row_bytes: int
    pieces: list[PagePiece] | None = None


class RankInfo(msgspec.Struct, array_like=True, frozen=True):
    """A rank, as it announces itself. local: name of its socket for processes of the same host. memory: see `direct.py`; by transport."""

    rank: int
    num_ranks: int
    host: str
    port: int
    local: str
    groups: list[GroupInfo]
    memory: dict[str, bytes] = {}


class Announce(msgspec.Struct, tag="announce"):
    secret: str
    rank: RankInfo


class Ask(msgspec.Struct, tag="ask"):
    engine_id: str


class Ranks(msgspec.Struct, tag="ranks"):
    ranks: list[RankInfo]


class Release(msgspec.Struct, tag="release"):
    engine_id: str
    lease: str


class Ok(msgspec.Struct, tag="ok"):
    pass


class Refused(msgspec.Struct, tag="refused"):
    """reason: one sentence."""

    reason: str


class Pull(msgspec.Struct, tag="pull", kw_only=True):
    """The blocks of these keys, in their order. heads: of each piece, the first and the end of those that are wanted; None: whole pages.
    way: how they come. waits: as many of the first ones as there are soon, maybe none: the others are still computed.
    """

    lease: str
    group: int
    keys: list[bytes]
    heads: list[tuple[int, int]] | None = None
    way: str = "socket"  # or "memory", or a transport of `direct.py`
    waits: bool = False


class Granted(msgspec.Struct, tag="granted", kw_only=True):
    """row_bytes: of a page, as it is sent. rows: of a chunk. pages: where they lie, if the asker reads them itself. num_keys: of those that
    were asked for.
    """

    row_bytes: int
    rows: int
    num_keys: int
    pages: list[int] = []


class Done(msgspec.Struct, tag="done"):
    pass


Message = Announce | Ask | Ranks | Release | Ok | Refused | Pull | Granted | Done
_DECODER = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


class TransferError(Exception):
    """The other engine does not answer, or refuses. The message is one sentence."""


class Channel:
    """A connection. Its methods raise `TransferError`. seconds: that a send or a receive may take."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._socket, self._seconds = connection, seconds
        connection.settimeout(seconds)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_local(self) -> bool:
        """Whether memory can be passed to the other side."""
        return self._socket.family == socket.AF_UNIX

    @property
    def is_open(self) -> bool:
        """Whether the other side has not closed the connection, as far as is known. Nothing may be under way."""
        try:
            self._socket.settimeout(0.0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._socket.settimeout(self._seconds)
        return False

    @classmethod
    def connect(cls, host: str, port: int, seconds: float) -> Channel:
        """To a TCP address."""
        try:
            return cls(socket.create_connection((host, port), timeout=seconds), seconds)
        except OSError as error:
            raise TransferError(f"The engine at {host}:{port} cannot be reached: {error}.") from error

    @classmethod
    def connect_local(cls, name: str, seconds: float) -> Channel | None:
        """To a socket of this host; None if it is not there."""
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.settimeout(seconds)
        try:
            one.connect(b"\0" + name.encode())
        except OSError:
            one.close()
            return None
        return cls(one, seconds)

    def send(self, message: Message) -> None:
        content = _ENCODER.encode(message)
        self.send_bytes(_LENGTH.pack(len(content)) + content)

    def send_bytes(self, content: bytes | memoryview) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise TransferError(f"The other engine's connection broke: {error}.") from error

    def wait(self, seconds: float) -> None:
        """Until something can be received. Raises `TransferError` if the other side is gone, or silent for so long."""
        try:
            self._socket.settimeout(seconds)
            if not self._socket.recv(1, socket.MSG_PEEK):
                raise TransferError("The other engine closed the connection.")
            self._socket.settimeout(self._seconds)
        except OSError as error:
            raise TransferError(f"The other engine's connection broke: {error}.") from error

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise TransferError(f"The other side sent a message of {length} bytes: it is no engine of this kind.")
        try:
            return _DECODER.decode(self._exactly(length))
        except msgspec.DecodeError as error:
            raise TransferError(f"The other side sent what is no message: {error}.") from error

    def ask(self, message: Message) -> Message:
        """Send a message and return the answer. Raises `TransferError` if it is refused."""
        self.send(message)
        answer = self.receive()
        if isinstance(answer, Refused):
            raise TransferError(answer.reason)
        return answer

    def receive_into(self, view: memoryview) -> None:
        """Fill the memory."""
        try:
            while view:
                count = self._socket.recv_into(view)
                if not count:
                    raise TransferError("The other engine closed the connection.")
                view = view[count:]
        except OSError as error:
            raise TransferError(f"The other engine's connection broke: {error}.") from error

    def send_memory(self, descriptor: int) -> None:
        """Pass a file descriptor to the other side, which has the same host."""
        try:
            socket.send_fds(self._socket, [b"m"], [descriptor])
        except OSError as error:
            raise TransferError(f"The other engine's connection broke: {error}.") from error

    def receive_memory(self, num_bytes: int) -> mmap.mmap:
        """Memory of the other side, mapped."""
        try:
            content, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except OSError as error:
            raise TransferError(f"The other engine's connection broke: {error}.") from error
        try:
            if not content or len(descriptors) != 1 or os.fstat(descriptors[0]).st_size < num_bytes:
                raise TransferError("The other engine sent no memory, or too little.")
            return mmap.mmap(descriptors[0], num_bytes)
        finally:
            for one in descriptors:
                os.close(one)

    def close(self) -> None:
        """May be called from another thread: what waits ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        self.receive_into(memoryview(content))
        return bytes(content)
