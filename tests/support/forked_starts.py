"""Engines and ranks that tests start as processes are forked from one that has imported torch, which takes seconds otherwise.

A fork becomes a child of the test's process: that can wait for it, and sees by which signal it was ended. It runs the same code with the
same standard input as a process that Python starts. Servers, and engines with an environment that libraries read when they are imported,
start as for users.

What forks have in common, and processes of users do not: the seed of string hashes (so the order of sets), the ids of objects that
exist before the fork, the state of random number generators, and all modules of `_IMPORTED`. So a fork does not show that ranks iterate
over a set in different orders, or that an import is missing. With START_AS_USERS=1, as in `make test-exhaustive`, no process is forked.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import platform
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_IMPORTED = ("torch._inductor.compile_fx", "torch.distributed", "transformers", "safetensors.torch", "zmq", "msgspec")
# Variables that these modules or Python read when they start.
_READ_AT_START = (
    *("HOME", "LANG", "LC_", "TMPDIR", "XDG_CACHE_HOME"),
    *("ATEN", "CXX", "GOMP", "HF_", "KMP", "LD_", "MKL", "NUMPY", "OMP", "OPENBLAS", "PYTHON", "PYTORCH_"),
    *("TORCH", "TRANSFORMERS", "TRITON"),
)
_READ_LATER = ("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE_PARENT = 0x8000
_LENGTH = struct.Struct("<q")


class _Start(NamedTuple):
    code: str
    env: dict[str, str]
    cwd: str
    in_new_session: bool


class _ForkServer:
    """A process that forks children of this one."""

    def __init__(self, env: dict[str, str]) -> None:
        """env: of the server, and so of what its modules read when they are imported."""
        self._owner = os.getpid()
        self._env = {name: value for name, value in env.items() if _is_read_at_start(name)}
        ours, theirs = socket.socketpair()
        code = f"import sys\nsys.path[:0] = {[str(Path(__file__).parents[2])]!r}\nfrom tests.support.forked_starts import serve\nserve()"
        with theirs:
            self._process = _Popen([sys.executable, "-c", code], stdin=theirs, env=env)
        self._socket = ours
        self._can_fork: bool | None = None

    def pid_of(self, start: _Start, descriptors: list[int]) -> int | None:
        """The process id of a new child. None if it has to start as for users."""
        env = {name: value for name, value in start.env.items() if _is_read_at_start(name)}
        if env != self._env or os.getpid() != self._owner:
            return None
        pid = -1
        try:
            if self._can_fork is None:
                self._can_fork = self._socket.recv(1) == b"1"
            if self._can_fork:
                content = pickle.dumps(tuple(start))
                socket.send_fds(self._socket, [_LENGTH.pack(len(content))], descriptors)
                self._socket.sendall(content)
                answer = self._socket.recv(_LENGTH.size, socket.MSG_WAITALL)
                if len(answer) == _LENGTH.size:
                    (pid,) = _LENGTH.unpack(answer)
        except OSError:  # the server was ended
            pass
        self._can_fork = pid > 0
        return pid if self._can_fork else None


_Popen = subprocess.Popen
_PARAMETERS = list(inspect.signature(_Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
_server: _ForkServer | None = None
_lock = threading.Lock()  # one start at a time talks to the server
_env = dict(os.environ)


class _ForkingPopen(_Popen[Any]):
    """`subprocess.Popen` that forks processes with our boot code."""

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_PARAMETERS, values, strict=True))
        pid = _forked(given)
        if pid is None:
            super()._execute_child(*values)  # type: ignore[misc]
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))  # type: ignore[attr-defined]


def fork_engines_and_ranks() -> None:
    """From now on this process forks engines and ranks. Of the environment, what it is now is taken for what their modules read."""
    global _env
    if sys.platform == "linux" and platform.machine() in _SYS_CLONE:
        _env = dict(os.environ)
        subprocess.Popen = _ForkingPopen  # type: ignore[misc]


def _forked(given: Mapping[str, Any]) -> int | None:
    global _server
    words = [*given["args"]] if isinstance(given["args"], list | tuple) else []
    if words[:2] != [sys.executable, "-c"] or len(words) != 3 or words[2] not in _boot_codes() or given["preexec_fn"] or given["pass_fds"]:
        return None
    start = _Start(words[2], dict(given["env"] or os.environ), given["cwd"] or os.getcwd(), bool(given["start_new_session"]))
    streams = (given["p2cread"], given["c2pwrite"], given["errwrite"])
    with _lock:
        if _server is None:
            _server = _ForkServer(_env)
        return _server.pid_of(start, [number if stream == -1 else stream for number, stream in enumerate(streams)])


def _boot_codes() -> list[str]:
    from compile_and_serve.runtime.distributed import rank_process
    from compile_and_serve.runtime.engine import process

    return [process.BOOT_CODE, rank_process.BOOT_CODE]


def _is_read_at_start(name: str) -> bool:
    return name.startswith(_READ_AT_START) and name not in _READ_LATER


def serve() -> None:
    """The server's main function: returns at its end, and in each child after the child has run."""
    ours = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    path = list(sys.path)
    for name in _IMPORTED:
        __import__(name)
    sys.path[:] = path[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours.sendall(b"1" if len(os.listdir("/proc/self/task")) == 1 else b"0")  # a fork has one thread
    while True:
        head, descriptors, _, _ = socket.recv_fds(ours, _LENGTH.size, 3)
        if not head:
            return
        (length,) = _LENGTH.unpack(head)
        content = b""
        while len(content) < length:
            content += ours.recv(length - len(content))
        pid = _fork_for_parent()
        if pid == 0:
            ours.close()
            _become(_Start(*pickle.loads(content)), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        ours.sendall(_LENGTH.pack(pid))


def _fork_for_parent() -> int:
    """As `os.fork`, but the new process is a child of this one's parent. -1 if the system refuses, as sandboxes may."""
    python = ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid: int = python.syscall(_SYS_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    python.PyOS_AfterFork_Parent() if pid else python.PyOS_AfterFork_Child()
    return pid


def _become(start: _Start, descriptors: list[int]) -> None:
    """Run a process's code as `python -c` does."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if start.in_new_session:
        os.setsid()
    exec(start.code, {"__name__": "__main__"})
