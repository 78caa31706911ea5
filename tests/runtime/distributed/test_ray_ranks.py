"""Ranks as actors of a Ray cluster on this host. test_process_executor.py tests the executor itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.distributed.process_executor import DistributedExecutor
from compile_and_serve.runtime.distributed.ray_ranks import RayRanks, ranks_on_host
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.fake_worker import give_orders
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Fake workers in a cluster of two CPUs. The ranks' folder must be empty at the end."""
    folder = tmp_path_factory.mktemp("of-ranks")
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra [ray])")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={
            "env_vars": {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            "worker_process_setup_hook": "tests.support.fake_worker.install",
        },
    )
    yield write_tiny_model(tmp_path_factory.mktemp("ray") / "tiny")
    ray.shutdown()
    wait_until(lambda: not list(folder.glob("cas-*")))


def start(model_dir: Path, **options: object) -> DistributedExecutor:
    config = tiny_config(model_dir, tensor_parallel_size=2, distributed_executor_backend="ray", **options)
    return DistributedExecutor(config, RayRanks(config), lambda *stage: None)


def run(executor: DistributedExecutor, number: int) -> dict[str, list[int]]:
    step = SchedulerOutput(
        step=number,
        new_requests=[],
        cached_requests=[],
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
        finished_request_ids=[],
    )
    return executor.result(executor.launch(step)).sampled_token_ids


def test_every_rank_gets_every_step(model_dir: Path, tmp_path: Path) -> None:
    give_orders(model_dir, record=str(tmp_path))
    executor = start(model_dir)
    assert executor.info.num_blocks == 90
    assert [run(executor, number) for number in range(6)] == [{"a": [number]} for number in range(6)]
    executor.shutdown()
    executor.shutdown()
    lines = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert lines[0] == lines[1]
    assert lines[0].count("\n") == 6


def test_a_rank_that_cannot_start_says_why(model_dir: Path) -> None:
    give_orders(model_dir, load={"1": "mistake"})
    with pytest.raises(ValueError, match=r"^Rank 1 of 2: the checkpoint is wrong: take another.$"):
        start(model_dir)


def test_a_rank_that_dies_ends_all(model_dir: Path) -> None:
    give_orders(model_dir, step={"0": "hang", "1": "kill"})
    executor = start(model_dir)
    with pytest.raises(RankFailedError, match=r"^Rank 1 of 2 was lost \(ActorDiedError"):
        [run(executor, number) for number in range(5)]
    executor.shutdown()
    give_orders(model_dir)
    again = start(model_dir)  # the resources are free again
    assert run(again, 0) == {"a": [0]}
    again.shutdown()


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = tiny_config(write_tiny_model(tmp_path / "tiny"), distributed_executor_backend="ray")
    with pytest.raises(ValueError, match=r"pip install 'compile-and-serve\[ray\]'"):
        RayRanks(config)


@pytest.mark.parametrize(
    ("hosts", "num_hosts", "replicas", "expected"),
    [
        ("aa", 1, 1, [2, 2]),
        ("ab", 2, 1, [1, 1]),
        ("aab", 2, 1, [2, 2, 2]),  # an upper bound: the mean, rounded up, since the hosts of other replicas are unknown
        ("aab", 3, 2, [2, 2, 2]),
        ("aa", 4, 1, [2, 2]),
        ("ab", 2, 3, [3, 3]),
    ],
)
def test_the_number_of_ranks_that_share_a_host(hosts: str, num_hosts: int, replicas: int, expected: list[int]) -> None:
    options = {"num_processes": len(hosts) * replicas, "num_hosts": num_hosts}
    assert [ranks_on_host(hosts, rank, **options) for rank in range(len(hosts))] == expected
