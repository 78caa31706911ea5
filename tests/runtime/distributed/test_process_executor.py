"""Ranks in processes of their own: every rank gets every step, and a failure of one ends all and names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.distributed.local_ranks import LocalRanks
from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
from compile_and_serve.runtime.distributed.rank_messages import RankFailed
from compile_and_serve.runtime.distributed.rank_process import RankBootstrap
from compile_and_serve.runtime.distributed.socket_keys import EngineKeys, RankKeys
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.fake_worker import use_fake_workers
from tests.support.processes import children, is_running, wait_until

SECONDS = 60.0  # a dead rank must be noticed within this time, even on a busy machine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("ranks") / "tiny")


@pytest.fixture(autouse=True)
def folders(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the sockets, which must be empty after the test. Executors that a failed test left are shut down."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_dir))
    yield short_dir
    left = list(short_dir.iterdir())
    while _started:
        _started.pop().shutdown()
    assert left == []


_started: list[DistributedExecutor] = []


class Ranks(LocalRanks):
    """Remembers its processes."""

    def __init__(self) -> None:
        super().__init__("cpu", 0, None)
        self.stages: list[tuple[str, float, str]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]


def start(model_dir: Path, ranks: Ranks, size: int = 2, stuck_seconds: float = 120.0, **options: Any) -> DistributedExecutor:
    config = tiny_config(model_dir, tensor_parallel_size=size, **options)
    executor = DistributedExecutor(config, ranks, lambda *stage: ranks.stages.append(stage), stuck_seconds=stuck_seconds)
    _started.append(executor)
    return executor


def step(number: int, *ids: str) -> SchedulerOutput:
    return SchedulerOutput(
        step=number,
        new_requests=[],
        cached_requests=[],
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
        finished_request_ids=[],
    )


def run(executor: DistributedExecutor, numbers: range) -> list[dict[str, list[int]]]:
    return [executor.result(executor.launch(step(number, "a"))).sampled_token_ids for number in numbers]


@pytest.mark.slow
def test_the_first_rank_of_the_last_stage_answers(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    executor = start(model_dir, Ranks(), 2, pipeline_parallel_size=3)
    assert executor.mesh == Mesh(pipe=3, tensor=2)
    assert executor.info.compile_report == {"rank": 4}
    assert run(executor, range(4)) == [{"a": [number]} for number in range(4)]  # an answer of another rank would come twice
    assert executor.info.num_blocks == 50
    executor.shutdown()


def test_stages_of_different_state_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, windows={"1": 16})
    with pytest.raises(ValueError, match="The stages of the model keep different state: each must have the same state groups"):
        start(model_dir, Ranks(), 1, pipeline_parallel_size=2)


def test_ranks_with_blocks_of_other_sizes_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, block_sizes={"1": 64})
    with pytest.raises(ValueError, match="Ranks take KV blocks of 4 and 64 tokens, .*: give --block-size"):
        start(model_dir, Ranks(), 2)


@pytest.mark.slow_cases
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", [1, 4])
def test_every_rank_gets_every_step_and_the_first_answers(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, device: str
) -> None:
    record = tmp_path / "record"
    record.mkdir()
    use_fake_workers(monkeypatch, model_dir, record=str(record), device=device)
    ranks = Ranks()
    executor = start(model_dir, ranks, size)
    assert executor.mesh == Mesh(tensor=size)
    assert executor.info.num_blocks == 100 - 10 * (size - 1)  # the smallest rank's
    # stages that one rank runs for all are reported from every rank
    compiled = [detail for stage, _, detail in ranks.stages if stage == "compile"]
    assert sorted(compiled) == ["a piece", *(f"a piece (rank {rank})" for rank in range(1, size))]
    assert [stage for stage in ranks.stages if stage[0] == "load"] == [("load", 0.5, "by rank 0")]
    in_flight = [executor.launch(step(0, "a", "b"))]
    for number in range(1, 8):
        in_flight.append(executor.launch(step(number, "a", f"r{number}")))
        output = executor.result(in_flight.pop(0))
        assert all(tokens == [number - 1] for tokens in output.sampled_token_ids.values())
    assert executor.result(in_flight.pop()).sampled_token_ids == {"a": [7], "r7": [7]}
    assert executor.stats().padded_tokens == executor.info.num_blocks
    assert not executor.idle(requests_wait=True)  # and what can wait is not lost
    assert [executor.idle() for _ in range(4)] == ([True, True, False, False] if device == "cuda" else [False] * 4)
    executor.shutdown()
    executor.shutdown()
    assert ranks.ended() == dict.fromkeys(range(size), "ended with status 0")
    lines = (record / "0").read_text()
    assert lines.count("\n") == 8
    assert all((record / str(rank)).read_text() == lines for rank in range(size))


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0 0", "1 0"]), ("6, MIG-5", ["6 0", "MIG-5 0"])])
def test_every_rank_sees_its_own_device_alone(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    use_fake_workers(monkeypatch, model_dir, devices=str(tmp_path))
    start(model_dir, Ranks()).shutdown()
    assert [(tmp_path / f"0-{rank}").read_text() for rank in range(2)] == expected


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("orders", "error", "message"),
    [
        ({"load": {"1": "mistake"}}, ValueError, r"^Rank 1 of 3: the checkpoint is wrong: take another.$"),
        ({"load": {"2": "error"}}, RankFailedError, r"^Rank 2 of 3 could not start: RuntimeError: connection closed"),
        ({"load": {"0": "hang", "1": "kill"}}, RankFailedError, r"^Rank 1 of 3 was ended by signal 9.$"),
    ],
)
def test_a_rank_that_cannot_start_says_why(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, orders: dict[str, object], error: type[Exception], message: str
) -> None:
    use_fake_workers(monkeypatch, model_dir, **orders)
    ranks = Ranks()
    with pytest.raises(error, match=message):
        start(model_dir, ranks, 3)
    assert len(ranks.pids) == 3
    assert not any(map(is_running, ranks.pids))


def test_a_rank_that_does_not_even_begin_is_named(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.runtime.distributed.local_ranks.BOOT_CODE", "import sys; sys.exit(7)")
    with pytest.raises(RankFailedError, match=r"^Rank \d of 2 ended with status 7.$"):
        start(model_dir, Ranks())


@pytest.mark.parametrize(("given", "expected"), [(None, "0 1"), ("1", "1 1")])
def test_ranks_run_without_multicast_unless_the_user_says_otherwise(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    file = tmp_path / "environment"
    code = f"""import os, sys
open({str(file)!r}, "w").write(" ".join(os.environ[n] for n in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")))
sys.exit(7)"""
    monkeypatch.setattr("compile_and_serve.runtime.distributed.local_ranks.BOOT_CODE", code)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", given)
    with pytest.raises(RankFailedError, match="ended with status 7"):
        start(model_dir, Ranks(), 1)
    assert file.read_text() == expected


def fail_in_the_fourth_step(model_dir: Path, message: str, stuck_seconds: float = 120.0) -> float:
    """Seconds until the executor raised `message`. All ranks must be gone soon after."""
    ranks = Ranks()
    executor = start(model_dir, ranks, 3, stuck_seconds)
    run(executor, range(3))
    began = time.monotonic()
    with pytest.raises(RankFailedError) as error:
        run(executor, range(3, 5))
    assert str(error.value) == message
    seconds = time.monotonic() - began
    executor.shutdown()
    assert time.monotonic() - began < SECONDS
    assert not any(map(is_running, ranks.pids))
    return seconds


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["orders1", "orders3", "orders6"])
@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({"step": {"0": "hang", "1": "kill"}}, "Rank 1 of 3 was ended by signal 9."),
        # the others fail in their collectives: a consequence, not the cause
        ({"step": {"0": "error", "1": "error", "2": "kill"}}, "Rank 2 of 3 was ended by signal 9."),
        ({"step": {"1": "hang", "0": "error"}}, "Rank 0 of 3 failed while it computed a step: RuntimeError: connection closed by peer"),
        (
            {"step": {"0": "mistake", "1": "hang"}},
            "Rank 0 of 3 failed while it computed a step: ValueError: the checkpoint is wrong: take another.",
        ),
        (
            {"device": "cuda", "result": {"2": "error", "0": "hang"}},
            "Rank 2 of 3 failed while it computed a step: RuntimeError: connection closed by peer",
        ),
        ({"device": "cuda", "result": {"0": "hang", "2": "kill"}}, "Rank 2 of 3 was ended by signal 9."),
        ({"step": {"0": "hang", "1": "end"}}, "Rank 1 of 3 ended with status 0."),  # a library called exit
    ],
)
def test_a_rank_that_fails_in_a_step_ends_all(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, orders: dict[str, object], message: str
) -> None:
    use_fake_workers(monkeypatch, model_dir, **orders)
    fail_in_the_fourth_step(model_dir, message)


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["orders0", "orders2"])
@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ({"step": {"0": "hang", "1": "stop", "2": "hang"}}, "Rank 1 of 3 sent no sign of life for 3 seconds while the others waited."),
        (
            {"device": "cuda", "result": {"0": "hang", "2": "hang"}},
            "Ranks 0, 2 of 3 made no progress for 3 seconds while the others waited.",
        ),
        ({"step": {"0": "hang", "1": "hang", "2": "hang"}}, "None of 3 ranks made progress for 3 seconds during a step."),
    ],
)
def test_ranks_that_make_no_progress_are_given_up(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, orders: dict[str, object], message: str
) -> None:
    use_fake_workers(monkeypatch, model_dir, **orders)
    assert fail_in_the_fourth_step(model_dir, message, stuck_seconds=3.0) > 2.9


@pytest.mark.parametrize("orders", [{}, {"adapters": {"1": "It has rank 64."}}])
def test_an_adapter_is_loaded_once_every_rank_has_read_it(model_dir: Path, monkeypatch: pytest.MonkeyPatch, orders: dict[str, Any]) -> None:
    """One that a rank could not read is an error of that load, whose requests do not run."""
    use_fake_workers(monkeypatch, model_dir, **orders)
    executor = start(model_dir, Ranks())
    for number in (1, 2):
        loading = executor.load_adapter(LoRARequest("style", number, "/adapters/style"))
        if number == 2:
            assert run(executor, range(3)) == [{"a": [0]}, {"a": [1]}, {"a": [2]}]  # answers may come between those of steps
        wait_until(lambda loading=loading: executor.poll() or loading.done())  # type: ignore[misc]
        error = loading.exception()
        assert str(error) == "It has rank 64." if orders else error is None
    executor.shutdown()


def test_an_idle_task_that_never_ends_is_given_up(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, device="cuda")
    ranks = Ranks()
    executor = start(model_dir, ranks, stuck_seconds=1.2)
    os.kill(ranks.pids[0], signal.SIGSTOP)
    try:
        with pytest.raises(RankFailedError, match=r"None of 2 ranks made progress for 1.2 seconds during an idle task\."):
            executor.idle()
    finally:
        os.kill(ranks.pids[0], signal.SIGCONT)
        executor.shutdown()


@pytest.mark.slow
def test_a_long_step_is_not_given_up_while_ranks_make_progress(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir, pause=0.5, collectives=6)
    executor = start(model_dir, Ranks(), stuck_seconds=2.5)
    assert run(executor, range(1)) == [{"a": [0]}]
    time.sleep(2.6)  # idle ranks send no reports
    assert run(executor, range(1, 2)) == [{"a": [1]}]
    executor.shutdown()


def test_a_signal_that_is_meant_for_the_parent_ends_no_rank(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C reaches the terminal's whole group, and systemd sends SIGTERM to every process of a service."""
    use_fake_workers(monkeypatch, model_dir, pause=0.1)
    ranks = Ranks()
    executor = start(model_dir, ranks)
    in_flight = executor.launch(step(0, "a"))
    for pid in ranks.pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert executor.result(in_flight).sampled_token_ids == {"a": [0]}
    assert run(executor, range(1, 3)) == [{"a": [1]}, {"a": [2]}]
    executor.shutdown()
    assert ranks.ended() == dict.fromkeys(range(2), "ended with status 0")


@pytest.mark.parametrize("next_call", ["idle", "launch", "shutdown"])
def test_a_rank_that_dies_while_nothing_runs_is_noticed(model_dir: Path, monkeypatch: pytest.MonkeyPatch, next_call: str) -> None:
    # The long step keeps rank 0 from answering before the executor sees that rank 1 has ended.
    use_fake_workers(monkeypatch, model_dir, pause=600)
    ranks = Ranks()
    executor = start(model_dir, ranks)
    assert not executor.idle()
    os.kill(ranks.pids[1], signal.SIGKILL)
    wait_until(lambda: 1 in ranks.ended())
    if next_call != "shutdown":
        with pytest.raises(RankFailedError, match="Rank 1 of 2 was ended by signal 9"):
            executor.idle() if next_call == "idle" else executor.result(executor.launch(step(0, "a")))
    executor.shutdown()
    assert not is_running(ranks.pids[0])


@pytest.mark.parametrize("moment", ["while they start", "when they are ready"])
def test_ranks_end_when_the_engine_is_killed(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    orders = {"load": {"1": "hang"}} if moment == "while they start" else {}
    use_fake_workers(monkeypatch, model_dir, devices=str(tmp_path), **orders)
    script = textwrap.dedent(f"""
        import tempfile, time
        from pathlib import Path
        import compile_and_serve.runtime.distributed.local_ranks as module
        from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
        from tests.support.engines import tiny_config
        from tests.support.fake_worker import FAKE_BOOT_CODE
        module.BOOT_CODE = FAKE_BOOT_CODE
        tempfile.tempdir = {tempfile.tempdir!r}
        class Ranks(module.LocalRanks):
            def launch(self, bootstraps):
                super().launch(bootstraps)
                print(*(process.pid for process in self._processes), flush=True)
        executor = DistributedExecutor(
            tiny_config(Path({str(model_dir)!r}), tensor_parallel_size=2), Ranks("cpu", 0, None), lambda *stage: None
        )
        print("ready", flush=True)
        time.sleep(600)
    """)
    engine = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    if moment == "when they are ready":
        assert engine.stdout.readline() == "ready\n"
    else:
        wait_until(lambda: (tmp_path / "0-1").exists())  # rank 1 loads its model
    engine.kill()
    engine.wait()
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize(
    ("victim", "reason"), [("rank", "Rank 1 of 2 was ended by signal 9."), ("engine", "The engine process was ended by signal 9.")]
)
async def test_a_death_while_the_engine_idles_reaches_the_client(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, victim: str, reason: str
) -> None:
    use_fake_workers(monkeypatch, model_dir)
    client = AsyncEngineClient(tiny_config(model_dir, tensor_parallel_size=2))
    await client.start()
    assert client.pid is not None
    ranks = children(client.pid)
    assert len(ranks) == 2
    began = time.monotonic()
    os.kill(ranks[1] if victim == "rank" else client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError) as error:
        async for _ in client.outputs():
            pass
    assert str(error.value) == reason
    assert time.monotonic() - began < SECONDS
    await client.shutdown()
    assert client.exit_status == (1 if victim == "rank" else -signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, ranks)))


class NetworkRanks(Ranks):
    """Ranks that are reached over TCP with keys, as those of `RayRanks`."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = EngineKeys()
        self.bootstraps: list[RankBootstrap] = []

    def address(self, name: str) -> str:
        return "tcp://127.0.0.1:*"

    def launch(self, bootstraps: Sequence[RankBootstrap]) -> None:
        self.bootstraps = list(bootstraps)
        super().launch(bootstraps)


def test_sockets_with_keys_serve_the_ranks_and_nobody_else(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_workers(monkeypatch, model_dir)
    ranks = NetworkRanks()
    executor = start(model_dir, ranks)
    assert run(executor, range(3)) == [{"a": [number]} for number in range(3)]
    command, answers = ranks.bootstraps[0].commands, ranks.bootstraps[0].answers
    known = ranks.keys.ranks
    lie = msgspec.msgpack.encode(RankFailed(0, "I am not a rank", False))
    with zmq.Context() as context:
        strangers = [None, RankKeys(known.engine, *zmq.curve_keypair()), RankKeys(zmq.curve_keypair()[0], known.public, known.secret)]
        for keys in strangers:
            with context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as listener:
                for socket, address in ((sender, answers), (listener, command)):
                    socket.linger = 0
                    if keys is not None:
                        keys.protect(socket)
                    socket.connect(address)
                sender.send(lie)  # kept until somebody accepts it
                assert run(executor, range(3, 6)) == [{"a": [number]} for number in range(3, 6)]
                assert not listener.poll(200)
        with context.socket(zmq.PUSH) as sender:  # the same message with a rank's keys is believed
            known.protect(sender)
            sender.connect(answers)
            sender.send(lie)
            with pytest.raises(RankFailedError, match="I am not a rank"):
                run(executor, range(6, 5000))  # it may arrive after some steps
    executor.shutdown()
