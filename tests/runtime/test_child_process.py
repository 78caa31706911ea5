"""Signals and folders of child processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compile_and_serve.runtime.child_process import EXIT_ORPHANED
from tests.support.processes import is_running, wait_until

ROOT = Path(__file__).parents[3]
SCRIPT = """
import os, sys, time
from compile_and_serve.runtime.child_process import private_folder, remove_after_exit
folder = private_folder()
remove_after_exit(folder)
open(folder + "/file", "w").close()
child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")  # outlives this process
print(folder, child, flush=True)
sys.stdin.read()
"""

SET_UP = """
import logging, os, signal, subprocess, sys, time
from compile_and_serve.runtime.child_process import set_up_child
set_up_child(who="", log_level=logging.WARNING, folder=None)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
compiler = subprocess.Popen(["sleep", "600"])
compiler.terminate()
print(compiler.wait(), flush=True)
time.sleep(600)
"""


def test_a_child_ignores_signals_but_its_own_children_do_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", SET_UP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
    process.stdin.close()
    assert process.wait() == EXIT_ORPHANED


@pytest.mark.parametrize("how", ["by itself", "by a signal"])
def test_a_folder_does_not_outlive_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdin is not None
    assert process.stdout is not None
    name, child = process.stdout.readline().split()
    folder = Path(name)
    try:
        time.sleep(0.2)  # for a shell that wrongly removes the folder at once
        assert (folder / "file").exists()
        process.kill() if how == "by a signal" else process.stdin.close()
        process.wait()
        wait_until(lambda: not folder.exists())
        assert is_running(int(child))
    finally:
        subprocess.run(["kill", child], check=True)
