"""Forked processes are children that run their code as those of `python -c` do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support import forked_starts

SAYS = """
import os, sys
print(os.getppid(), os.getsid(0) == os.getpid(), "torch" in sys.modules, os.environ.get("A"), sys.stdin.read())
sys.exit(3)
"""
SLEEPS = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def forked_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_starts, "_boot_codes", lambda: [SAYS, SLEEPS])
    if subprocess.Popen is not forked_starts._ForkingPopen or "True" not in said():
        pytest.skip("processes are not forked here")


def said(**options: object) -> list[str]:
    done = subprocess.run([sys.executable, "-c", SAYS], input="text", stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 3
    return done.stdout.split()  # type: ignore[no-any-return]


def test_a_fork_is_a_child_with_its_own_environment_and_streams() -> None:
    ours = str(os.getpid())
    assert said() == [ours, "False", "True", str(os.environ.get("A")), "text"]
    assert said(env=os.environ | {"A": "1"}, start_new_session=True) == [ours, "True", "True", "1", "text"]


def test_another_environment_of_torch_starts_a_process() -> None:
    assert said(env=os.environ | {"TORCH_LOGS": "recompiles"})[2] == "False"


def test_the_signal_that_ends_a_fork_is_known() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLEEPS])
    process.kill()
    assert process.wait() == -signal.SIGKILL
