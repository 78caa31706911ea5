"""The socket that the server listens on: a TCP address or a Unix socket."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class ServerStartError(ValueError):
    """The server cannot start. The message is one sentence."""


def open_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A bound TCP socket that does not listen yet. shared: others of this user may bind the same address (SO_REUSEPORT).

    Raises `ServerStartError` if the address cannot be bound, also if another program listens there already.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ServerStartError(f"The host '{host}' does not resolve to an address ({error.strerror}).") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerStartError(bind_problem(host, port, error)) from error
    listener.setblocking(False)
    return listener


@contextmanager
def claimed_address(host: str, port: int, uds: Path | None) -> Iterator[None]:
    """Keep other servers off an address while the body runs, from before the model is loaded: a socket that does not listen yet looks
    like one that a dead server left behind.

    Raises `ServerStartError` if another server has it.
    """
    with _claimed_port(host, port) if uds is None else _claimed_path(uds):
        yield


@contextmanager
def _claimed_port(host: str, port: int) -> Iterator[None]:
    if port == 0 or sys.platform != "linux":
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        try:
            claim.bind(f"\0compile-and-serve {host}:{port}")  # a name without a file; it ends with this process
        except OSError as error:
            raise ServerStartError(bind_problem(host, port, error)) from error
        yield


@contextmanager
def _claimed_path(path: Path) -> Iterator[None]:
    lock = path.with_name(f"{path.name}.lock")
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ServerStartError(f"The Unix socket {path} cannot be created ({error.strerror}: {lock}).") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            raise ServerStartError(f"Another server has --uds {path}: choose another path.") from error
        found = os.fstat(file)
        if inode_of(lock) == (found.st_dev, found.st_ino):
            break
        os.close(file)  # its owner has just ended and removed it
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


def inode_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file, which tell whether it was replaced. None: there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def open_unix_socket(path: Path) -> socket.socket:
    """A bound Unix socket that only this user can connect to. A socket that a dead server left behind is replaced.

    Raises `ServerStartError` if a server listens there, or the path cannot be used.
    """
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ServerStartError(f"The Unix socket {path} cannot be created ({error.strerror or error}).") from error
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener


def bind_problem(host: str, port: int, error: OSError) -> str:
    """One sentence for an address that cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is in use: choose another with --port, or stop the program that uses it."
    if error.errno == errno.EACCES:
        return f"Port {port} needs administrator rights: choose one above 1023 with --port."
    return f"The server cannot listen on {host}:{port} ({error.strerror})."


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ServerStartError(f"--uds {path} exists and is not a socket: choose another path.")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ServerStartError(f"--uds {path} cannot be used ({error.strerror}).") from error
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise ServerStartError(f"--uds {path} cannot be used ({error.strerror}).") from error
    raise ServerStartError(f"Another server listens on --uds {path}: choose another path.")
