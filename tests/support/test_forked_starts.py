"""Forked processes are children that run their code as those of `python -c` do."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest
import torch

from tests.support import forked_starts

SAYS = """
import os, sys
print(os.getppid(), os.getsid(0) == os.getpid(), "torch" in sys.modules, os.environ.get("A"), sys.stdin.read())
sys.exit(3)
"""
SLEEPS = "import time; time.sleep(60)"
FORKS_HERE = (
    sys.platform == "linux"
    and platform.machine() in forked_starts._SYS_CLONE
    and not torch.cuda.is_available()
    and os.environ.get("START_AS_USERS") != "1"
    and os.environ.get("OMP_NUM_THREADS") == "1"  # with more, libraries start threads when they are imported, which no fork has
)

pytestmark = pytest.mark.skipif(not FORKS_HERE, reason="needs Linux, no GPU, OMP_NUM_THREADS=1, not START_AS_USERS=1")


@pytest.fixture(autouse=True)
def forked_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_starts, "_boot_codes", lambda: [SAYS, SLEEPS])
    assert subprocess.Popen is forked_starts._ForkingPopen


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


@pytest.mark.parametrize("failure", ["refused", "ended"])
def test_what_cannot_be_forked_starts_as_for_users(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    popen = forked_starts._Popen
    changes = "from tests.support import forked_starts\nforked_starts._IMPORTED = ()"
    if failure == "refused":
        changes += "\nforked_starts._SYS_CLONE = dict.fromkeys(forked_starts._SYS_CLONE, -1)"  # a system call that there is not

    def start(words: list[str], **options: object) -> subprocess.Popen[bytes]:
        return popen([*words[:2], words[2].replace("\nserve()", f"\n{changes}\nserve()")], **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(forked_starts, "_Popen", start)
    server = forked_starts._ForkServer(forked_starts._env)
    monkeypatch.setattr(forked_starts, "_server", server)
    try:
        if failure == "ended":
            said()
            assert server._can_fork
            server._process.kill()
            server._process.wait()
        for _ in range(2):
            assert said() == [str(os.getpid()), "False", "False", str(os.environ.get("A")), "text"]
            assert server._can_fork is False
        assert (server._process.poll() is None) == (failure == "refused")  # it refused and did not fail
    finally:
        server._process.kill()
        server._process.wait()
        server._socket.close()
