"""Ranks on two hosts: both are this one, or two network namespaces of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed import host_agent, hosts
from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.distributed.host_agent import _HostAgent
from compile_and_serve.runtime.distributed.hosts import HostRanks
from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
from tests.runtime.distributed.test_process_executor import run
from tests.serve.test_supervisor import free_ports
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.fake_worker import use_fake_workers
from tests.support.processes import wait_until

SECRET = "one that all hosts share"


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of all hosts, whose workers are fakes. A silent host is gone after a second."""
    folder = write_tiny_model(tmp_path / "tiny")
    (tmp_path / "key").write_text(SECRET)
    for module in (hosts, host_agent):
        monkeypatch.setattr(module, "SILENT_SECONDS", 1.5)
    monkeypatch.setattr(HostRanks, "cause_seconds", 2.5)
    use_fake_workers(monkeypatch, folder)
    return {"folder": folder, "pipeline_parallel_size": 2, "nnodes": 2, "master_port": free_ports(1), "master_key_file": tmp_path / "key"}


class Agent:
    """Host 1, in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.agent = _HostAgent(config)
        self.ended_with: object = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ended_with = self.agent.run()
        except ValueError as error:
            self.ended_with = str(error)

    @property
    def pids(self) -> list[int]:
        assert self.agent._ranks is not None
        return [process.pid for process in self.agent._ranks._processes]


def executor_of(config: EngineConfig) -> DistributedExecutor:
    return DistributedExecutor(config, HostRanks(config, join_seconds=60.0), lambda *stage: None)


def listening(pid: int | str = "self") -> set[str]:
    """Addresses on which processes in the network namespace of `pid` listen, without those of the processes that were there before."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:] + Path(f"/proc/{pid}/net/tcp6").read_text().splitlines()[1:]
    return {fields[1].rpartition(":")[0] for line in lines if (fields := line.split())[3] == "0A"}


def test_steps_run_on_both_hosts_and_the_engine_ends_both(given: dict[str, Any]) -> None:
    agent = Agent(tiny_config(**given, node_rank=1))  # it may begin before the engine
    executor = executor_of(tiny_config(**given))
    assert executor.info.num_blocks == 90
    assert run(executor, range(4)) == [{"a": [number]} for number in range(4)]
    assert len(agent.pids) == 1
    executor.shutdown()
    agent.thread.join(20)
    assert agent.ended_with == 0


def test_a_rank_that_dies_is_named_and_so_is_a_host_that_goes_away(given: dict[str, Any]) -> None:
    agent = Agent(tiny_config(**given, node_rank=1))
    executor = executor_of(tiny_config(**given))
    os.kill(agent.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailedError, match=r"^Rank 1 of 2 was ended by signal 9\.$"):
        wait_until(lambda: run(executor, range(1)) is None)
    executor.shutdown()
    agent.thread.join(20)
    agent = Agent(tiny_config(**given, node_rank=1))
    executor = executor_of(tiny_config(**given))
    agent.agent.end()  # without a word to the engine
    agent.thread.join(20)
    sentence = r"^Rank 1 of 2 was lost with host 1 of 2 \(127\.0\.0\.1\), which has sent nothing for 1\.5 seconds\.$"
    with pytest.raises(RankFailedError, match=sentence):
        wait_until(lambda: executor.idle() is None)
    executor.shutdown()


def test_a_host_waits_for_the_next_engine(given: dict[str, Any]) -> None:
    agent = Agent(tiny_config(**given, node_rank=1))
    for _ in range(2):
        executor = executor_of(tiny_config(**given))
        assert run(executor, range(2)) == [{"a": [0]}, {"a": [1]}]
        link = executor._host._link  # type: ignore[attr-defined]
        link._is_over = lambda: True  # the engine is gone without a word
        link._thread.join()
        pids = agent.pids
        wait_until(lambda: agent.agent._ranks is None)
        executor._has_failed = True
        executor.shutdown()
        assert pids
    agent.agent.end()
    agent.thread.join(20)


def test_only_those_with_the_secret_join(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another secret of some length")
    stranger = Agent(tiny_config(**(given | {"master_key_file": tmp_path / "other"}), node_rank=1))
    config = tiny_config(**given)
    host = HostRanks(config, join_seconds=2.0)
    sentence = f"Host 1 of 2 did not join at tcp://127.0.0.1:{given['master_port']} within 2 seconds: start each with --headless"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DistributedExecutor(config, host, lambda *stage: None)
    stranger.agent.end()
    stranger.thread.join(20)


def test_a_host_of_another_number_of_hosts_is_refused(given: dict[str, Any]) -> None:
    config = tiny_config(**given)
    host = HostRanks(config, join_seconds=60.0)
    agent = Agent(tiny_config(**(given | {"pipeline_parallel_size": 3, "nnodes": 3}), node_rank=2))
    agent.thread.join(20)
    assert "it is host 2 of 3, but there are 2. Give all the same --nnodes." in str(agent.ended_with)
    host.stop(0.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 1}, "nnodes is 2, but pipeline_parallel_size is 1: the stages are divided over the hosts"),
        ({"master_key_file": None}, "Several hosts need a secret that they share"),
        ({"node_rank": 2}, "node_rank is 2, but the 2 hosts have the numbers from 0"),
        ({"data_parallel_size": 2}, "nnodes does not go with data_parallel_size"),
        ({"nnodes": 1, "node_rank": 1}, "node_rank is 1, but there is one host"),
    ],
)
def test_wrong_options_are_a_sentence(given: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        tiny_config(**(given | changes))


def test_a_wrong_secret_or_address_is_a_sentence(given: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    for changes, reason in (
        ({"master_key_file": tmp_path / "short"}, "holds 5 bytes: write at least 16"),
        ({"master_key_file": tmp_path / "none"}, "none cannot be read: No such file or directory."),
        ({"master_addr": "192.0.2.7"}, "--master-addr 192.0.2.7 is no address of this host"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            HostRanks(tiny_config(**(given | changes)))


class Namespaces:
    """Two network namespaces with a cable between them: 10.9.0.1 and 10.9.0.2."""

    def __init__(self, stack: ExitStack) -> None:
        first = subprocess.Popen(["unshare", "-rn", "sleep", "600"])
        stack.callback(first.kill)
        wait_until(lambda: os.readlink(f"/proc/{first.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        second = subprocess.Popen([*self._enter(first.pid), "unshare", "-n", "sleep", "600"])
        stack.callback(second.kill)
        wait_until(lambda: os.readlink(f"/proc/{second.pid}/ns/net") != os.readlink(f"/proc/{first.pid}/ns/net"))
        self.pids = [first.pid, second.pid]
        self.run(0, "ip link add v0 type veth peer name v1")
        self.run(0, f"ip link set v1 netns {second.pid}")
        for host in range(2):
            for command in (f"addr add 10.9.0.{host + 1}/24 dev v{host}", f"link set v{host} up", "link set lo up"):
                self.run(host, f"ip {command}")

    def _enter(self, pid: int) -> list[str]:
        return ["nsenter", "-t", str(pid), "-U", "-n", "--preserve-credentials"]

    def run(self, host: int, command: str) -> None:
        subprocess.run([*self._enter(self.pids[host]), *command.split()], check=True)

    def start(self, host: int, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._enter(self.pids[host]), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[3],
        )


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if shutil.which("ip") is None or subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces cannot be made here")
    with ExitStack() as stack:
        yield Namespaces(stack)


ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
request = urllib.request.Request("http://127.0.0.1:8123/v1/completions", body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"].__repr__())
"""


@pytest.mark.exhaustive
def test_two_namespaces_serve_lose_a_host_and_serve_again(tiny_llama_dir: Path, tmp_path: Path, namespaces: Namespaces) -> None:
    key = tmp_path / "key"
    key.write_text(SECRET)
    model = [str(tiny_llama_dir), "--dtype", "float32", "--device", "cpu", "--max-model-len", "256", "--num-threads", "1"]
    model += [
        "-pp",
        "2",
        "--nnodes",
        "2",
        "--master-addr",
        "10.9.0.1",
        "--master-key-file",
        str(key),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    serve = [sys.executable, "-m", "compile_and_serve.serve.cli", "serve", *model]

    def start() -> list[tuple[subprocess.Popen[str], list[str]]]:
        started = []
        for host, more in enumerate((["--port", "8123", "--served-model-name", "tiny"], ["--headless", "--node-rank", "1"])):
            process = namespaces.start(host, *serve, *more)
            lines: list[str] = []
            threading.Thread(target=lambda out=process.stdout, to=lines: to.extend(out), daemon=True).start()
            started.append((process, lines))
        return started

    def is_serving(lines: list[str]) -> bool:
        return any("Serving tiny on" in line for line in lines)

    def ask() -> str:
        return namespaces.start(0, sys.executable, "-c", ASK).communicate(timeout=120)[0]

    (server, said), (other, other_said) = start()
    try:
        wait_until(lambda: is_serving(said) or server.poll() is not None, seconds=200)
        assert is_serving(said), "".join((*said, *other_said))
        answer = ask()
        assert answer.startswith("'"), answer
        for pid in namespaces.pids:
            assert not listening(pid) & {"00000000", "0" * 32}  # on all addresses
        os.killpg(other.pid, signal.SIGKILL)
        assert server.wait(60) == 1
        time.sleep(0.2)
        assert "Rank 1 of 2 was lost with host 1 of 2 (10.9.0.2), which has sent nothing for 5 seconds." in "".join(said), "".join(said)
        (server, said), (other, other_said) = start()
        wait_until(lambda: is_serving(said) or server.poll() is not None, seconds=200)
        assert ask() == answer
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        try:
            assert other.wait(30) == 0, "".join(other_said)
        except subprocess.TimeoutExpired:
            pytest.fail("".join(other_said))
    finally:
        for process in (server, other):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
