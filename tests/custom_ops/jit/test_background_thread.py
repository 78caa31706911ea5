"""Builds beside a running process take what time is left, and end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from compile_and_serve.custom_ops.jit.background_thread import LOWEST, num_running, run_in_background
from compile_and_serve.custom_ops.jit.cpp import BuildError, run_all
from tests.support.processes import is_running


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_a_thread_and_its_programs_have_the_lowest_priority_and_the_process_keeps_its_own() -> None:
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []

    def work() -> None:
        code = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
        found.append(int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout))

    go_on = threading.Event()
    waiting = run_in_background("waiting", go_on.wait)
    run_in_background("test", work).join()
    assert num_running() == 1
    go_on.set()
    waiting.join()
    assert num_running() == 0
    assert found == [LOWEST]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_so_many_commands_at_once(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; here = pathlib.Path(sys.argv[1]); me = here / sys.argv[2]; me.touch(); "
        "n = len(list(here.glob('[0-9]'))); time.sleep(0.2); me.rename(here / f'done-{sys.argv[2]}-{n}')"
    )
    run_all([(str(i), [sys.executable, "-c", code, str(tmp_path), str(i)]) for i in range(5)], at_once=2)
    done = [file.name for file in tmp_path.iterdir()]
    assert sorted(name.split("-")[1] for name in done) == ["0", "1", "2", "3", "4"]
    assert max(int(name.split("-")[2]) for name in done) <= 2


def test_nothing_more_is_started_after_a_failure(tmp_path: Path) -> None:
    failing = [sys.executable, "-c", "import sys; print('file.cu: error: no such thing', file=sys.stderr); sys.exit(1)"]
    touching = [sys.executable, "-c", f"open({str(tmp_path / 'late')!r}, 'w')"]
    with pytest.raises(BuildError, match=r"the compiler failed on first: file\.cu: error: no such thing"):
        run_all([("first", failing), ("second", touching)], at_once=1)
    assert not (tmp_path / "late").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pass", "from compile_and_serve.custom_ops.jit.cpp import end_builds; end_builds(); os._exit(0)"])
def test_a_process_that_ends_does_not_wait_and_takes_its_compilers_along(ending: str, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, sys, time
from compile_and_serve.custom_ops.jit.background_thread import run_in_background
from compile_and_serve.custom_ops.jit.cpp import run_all
pid = pathlib.Path({str(tmp_path / "pid")!r})
shell = f"sleep 300 & echo $! > {{pid}}; wait"
run_in_background("build", lambda: run_all([("kernels", ["/bin/sh", "-c", shell])]))
while not (pid.exists() and pid.read_text().strip()):
    time.sleep(0.01)
{ending}
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert time.monotonic() - start < 60
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < until, "what the compiler had started is still there"
        time.sleep(0.05)
