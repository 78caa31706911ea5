"""How every process of ours begins, and how it learns that whoever started it is gone.

The parent runs `python -c <boot_code(module)>`, writes `boot_input(...)` to its standard input and keeps that pipe open:
its end tells the child that the parent is gone, however it went.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

EXIT_FAILURE = 1
EXIT_ORPHANED = 3
LINGER_MS = 2000  # for messages that are on their way when a process ends
_MAX_FOLDER_BYTES = 100
_held_open: list[int] = []


def boot_code(module: str) -> str:
    """Python source that calls `main()` of one of our modules, with the parent's import path set before anything is imported."""
    return f"""\
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from compile_and_serve.runtime.distributed.bytecode import keep_bytecode
keep_bytecode()
from {module} import main
main()
"""


def one_device(index: int) -> tuple[dict[str, str], int]:
    """What the environment of a child must have so that it sees one CUDA device alone, and the device's number there.

    index: among the devices that we see. All processes then call theirs device 0, and what one has compiled is the others' too. Where
    CUDA_VISIBLE_DEVICES names fewer devices, the child sees what we see, and says what is wrong where it has CUDA at all.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return {"CUDA_VISIBLE_DEVICES": str(index)}, 0
    names = [
        name.strip() for name in visible.split(",") if name.strip()
    ]  # numbers, or UUIDs of GPUs or of their MIG instances
    return ({"CUDA_VISIBLE_DEVICES": names[index]}, 0) if index < len(names) else ({}, index)


def boot_input(bootstrap: object) -> bytes:
    """What the child reads first: our import path, and what it needs to begin."""
    return pickle.dumps([path or os.getcwd() for path in sys.path]) + pickle.dumps(bootstrap)


def read_bootstrap() -> Any:
    """The object that the parent gave to `boot_input`."""
    return pickle.load(sys.stdin.buffer)


def settle_in(*, who: str, log_level: int, folder: str | None) -> None:
    """Leave Ctrl-C and SIGTERM to the parent, log to standard error, and end with the parent.

    who: precedes every line of the log, e.g. "rank 1". folder: removed by a process that its parent left behind.
    """
    # Ctrl-C reaches the whole terminal's group, and SIGTERM from systemd or a container's runtime may reach every process of a service:
    # when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _do_nothing)  # SIG_IGN would be inherited by compilers, which we end by it
    signal.siginterrupt(signal.SIGTERM, False)
    line = f"%(levelname)s {who} %(name)s: %(message)s" if who else "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.WARNING, format=line, stream=sys.stderr)
    logging.getLogger("compile_and_serve").setLevel(log_level)
    threading.Thread(target=_exit_with_parent, args=(folder,), name="parent-watch", daemon=True).start()


def describe_error(error: Exception) -> str:
    """One line: its kind, and the first line of what it says."""
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first_line[:300]}"


def describe_exit(status: int) -> str:
    """ "was ended by signal 9" or "ended with status 1; its log may say more"."""
    if status < 0:
        return f"was ended by signal {-status}"
    return f"ended with status {status}" + ("; its log may say more" if status == EXIT_FAILURE else "")


def private_folder(parent: Path | None = None) -> str:
    """A new folder that only this user can enter, its path short enough for a Unix socket in it (107 bytes).

    A process keeps everything that must not outlive it in the folder that its parent made for it: whoever is left removes it.
    """
    folder = tempfile.mkdtemp(prefix="cas-", dir=parent)
    if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="cas-", dir="/tmp")
    return folder


def remove_after_us(folder: str) -> None:
    """Have a folder removed once this process has ended, however it ends, where no parent of ours is there to do it.

    By a shell that waits for the end of a pipe which nobody but us holds open. It is nobody's child any more: whoever ends this process
    with its children does not end that one.
    """
    ours_is_open, ours = os.pipe()
    wait_and_remove = 'exec 3<&0; (cat <&3; rm -rf -- "$1") >/dev/null 2>&1 &'
    subprocess.run(["sh", "-c", wait_and_remove, "sh", folder], stdin=ours_is_open, start_new_session=True, check=False)
    os.close(ours_is_open)
    _held_open.append(ours)


def _do_nothing(*_: object) -> None: ...


def _exit_with_parent(folder: str | None) -> None:
    sys.stdin.buffer.read()  # returns when the parent closes its end, or dies
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    exit_at_once(EXIT_ORPHANED)


def exit_at_once(status: int) -> NoReturn:
    """End without the interpreter's tear-down: threads of the kernels and compile workers have nothing left to save, compilers end."""
    sys.stderr.flush()
    if (
        build := sys.modules.get("compile_and_serve.custom_ops.build.cpp")
    ) is not None:  # imported by whoever builds; it takes torch along
        build.end_builds()
    if (inductor := sys.modules.get("compile_and_serve.compiler.inductor")) is not None:
        inductor.end_kernel_compilers()
    os._exit(status)
