"""How our child processes start, and how they notice that their parent is gone.

The parent runs `python -c <boot_code(module)>`, writes `boot_input(...)` to the child's standard input and keeps that
pipe open. When the parent ends, for whatever reason, the pipe closes and the child ends too.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, NoReturn

from compile_and_serve.custom_ops.device_names import BUILT_IN_DEVICES
from compile_and_serve.runtime.logs import JsonHandler, LogFormat

EXIT_FAILURE = 1
EXIT_ORPHANED = 3
LINGER_MS = 2000  # how long a closing socket may take to deliver its queued messages
_LENGTH = struct.Struct("<Q")  # of a message in a pipe
_MAX_FOLDER_BYTES = 97  # a Unix socket's path has at most 107 bytes, and the longest name is "/heartbeat"
_heap_is_frozen = False
_held_open: list[int] = []  # file descriptors, until this process ends


def boot_code(module: str) -> str:
    """Python source that takes over the parent's import path, then calls `main()` of `module`."""
    return f"""\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from compile_and_serve.runtime.distributed.bytecode import keep_bytecode
keep_bytecode()
from {module} import main
main()
"""


def one_device(index: int, device: str) -> tuple[dict[str, str], int]:
    """Environment variables with which a child sees a single CUDA device, and that device's number in the child.

    index: the device's number in this process. Every child then calls its device 0, so all of them can share compiled
    artifacts. If CUDA_VISIBLE_DEVICES names too few devices, the child sees what this process sees and reports the error.
    device: the option. A child sees all devices of a plug-in's platform.
    """
    if device not in BUILT_IN_DEVICES:
        return {}, index
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(index)}, 0
    names = [name.strip() for name in visible.split(",") if name.strip()]  # numbers, or UUIDs of GPUs or MIG instances
    return ({"CUDA_VISIBLE_DEVICES": names[index]}, 0) if index < len(names) else ({}, index)


def boot_input(bootstrap: object) -> bytes:
    """The bytes that the child reads first: this process's import path, then `bootstrap`, both pickled."""
    return pickle.dumps([path or os.getcwd() for path in sys.path]) + pickle.dumps(bootstrap)


def read_bootstrap() -> Any:
    """The object that the parent passed to `boot_input`."""
    return pickle.load(sys.stdin.buffer)


def frame(content: bytes) -> tuple[bytes, bytes]:
    """The length of a message for `read_frame`, and the message."""
    return _LENGTH.pack(len(content)), content


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    content = stream.read(length)
    return content if len(content) == length else None


class AnsweringProcess:
    """A child that answers one framed request at a time, each within a deadline. environment: None is this process's."""

    def __init__(self, boot_code: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._boot = boot_input(None)
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def has_started(self) -> bool:
        """Whether it was asked before. The first answer takes longer."""
        return not self._boot

    def ask(self, parts: list[bytes], seconds: float) -> bytearray:
        """Send the parts of a request, which frees them, and wait for the answer.

        Raises `TimeoutError`, or another `OSError` if the process ends. Then call `close`.
        """
        deadline = time.monotonic() + seconds
        boot, self._boot = self._boot, b""
        self._write(memoryview(boot), deadline)
        while parts:
            self._write(memoryview(parts.pop(0)), deadline)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def kill(self) -> None:
        """Make an `ask` in another thread raise. `close` must still be called."""
        self._process.kill()

    def close(self) -> int:
        """Kill the process. → its exit status"""
        self._process.kill()
        self._stdin.close()
        self._stdout.close()
        return self._process.wait()

    def _write(self, data: memoryview, deadline: float) -> None:
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            data = data[os.write(self._stdin.fileno(), data[: 1 << 20]) :]

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            self._wait(self._stdout, select.POLLIN, deadline)
            count = os.readv(self._stdout.fileno(), [rest])
            if not count:
                raise ConnectionResetError
            rest = rest[count:]
        return data

    @staticmethod
    def _wait(stream: IO[bytes], event: int, deadline: float) -> None:
        poll = select.poll()  # unlike `select.select`, takes file descriptors above 1023
        poll.register(stream, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise TimeoutError


def set_up_child(*, who: str, log_level: int, folder: str | None, log_format: LogFormat = "text") -> None:
    """Ignore Ctrl-C and SIGTERM, log to standard error, and exit when the parent is gone.

    who: prefix of every log line, e.g. "rank 1". folder: removed if the parent dies first.
    """
    # Ctrl-C reaches the terminal's whole process group, and systemd or a container runtime may send SIGTERM to every
    # process of a service. The parent alone decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)  # compilers would inherit SIG_IGN, and we end them by SIGTERM
    signal.siginterrupt(signal.SIGTERM, False)
    line = f"%(levelname)s {who} %(name)s: %(message)s" if who else "%(levelname)s %(name)s: %(message)s"
    if log_format == "json":
        logging.basicConfig(level=logging.WARNING, handlers=[JsonHandler(who or "engine")])
    else:
        logging.basicConfig(level=logging.WARNING, format=line, stream=sys.stderr)
    logging.getLogger("compile_and_serve").setLevel(log_level)
    threading.Thread(target=_exit_with_parent, args=(folder,), name="parent-watch", daemon=True).start()


def freeze_heap() -> None:
    """Let the garbage collector skip what exists now: modules, the model, its graphs. It would look at them for half a second."""
    global _heap_is_frozen
    gc.freeze()
    _heap_is_frozen = True


def unfreeze_heap() -> None:
    """Let the garbage collector look at everything again that `freeze_heap` froze. What others froze stays so."""
    global _heap_is_frozen
    if _heap_is_frozen:
        gc.unfreeze()
        _heap_is_frozen = False


def describe_error(error: Exception) -> str:
    """One line: the error's type and the first line of its message, cut to 300 characters."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first_line[:300]}"


def describe_exit(status: int) -> str:
    """A predicate for a message: "was ended by signal 9" or "ended with status 1; its log may say more"."""
    if status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}" + ("; its log may say more" if status == EXIT_FAILURE else "")


def private_folder(parent: Path | None = None) -> str:
    """Create a folder that only this user can enter, with a path short enough for a Unix socket inside it.

    parent: None is the system's temporary folder. A child keeps everything that must not outlive it in the folder that
    its parent created for it. Whichever of the two ends last removes the folder.
    """
    folder = tempfile.mkdtemp(prefix="cas-", dir=parent)
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="cas-", dir="/tmp")
    return folder


def remove_after_exit(folder: str) -> None:
    """Have `folder` removed after this process ends, however it ends. For processes without a parent that would do it.

    A detached shell waits until the pipe that only this process holds open is closed. The shell is not our child, so it
    survives when this process is killed together with its children.
    """
    read_end, write_end = os.pipe()
    wait_and_remove = 'exec 3<&0; (cat <&3; rm -rf -- "$1") >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", wait_and_remove, "sh", folder], stdin=read_end, start_new_session=True, check=False)
    os.close(read_end)
    _held_open.append(write_end)


def exit_at_once(status: int) -> NoReturn:
    """End the process without the interpreter's shutdown, which would wait for kernel threads and compile workers.

    Compilers that we started are ended first.
    """
    sys.stderr.flush()
    # These modules import torch. If they are not imported, they have started nothing.
    if (build := sys.modules.get("compile_and_serve.custom_ops.jit.cpp")) is not None:
        build.end_builds()
    if (inductor := sys.modules.get("compile_and_serve.compiler.inductor")) is not None:
        inductor.end_kernel_compilers()
    os._exit(status)


def _do_nothing(*_: object) -> None: ...


def _exit_with_parent(folder: str | None) -> None:
    sys.stdin.buffer.read()  # returns when the parent closes its end or dies
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    exit_at_once(EXIT_ORPHANED)
