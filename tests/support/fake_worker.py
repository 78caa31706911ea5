"""A worker without a model, for tests of the processes around it. Rank processes use it as their worker (see `use_fake_workers`).

A JSON file in the model's folder tells it what to do besides answering steps:
- "device": "cpu" or "cuda", the kind that it reports.
- "record": a folder where each rank writes down its steps.
- "timeline": a folder where each rank writes down in a file "replica-rank" when a step or an idle task begins.
- "captures": "due" after each step.
- "idle": the number of idle tasks, by default 2.
- "windows": {rank: the window of its state group}, by default none.
- "block_sizes": {rank: tokens per block}, by default the config's.
- "devices": a folder where each rank writes which CUDA devices it sees, and which is its own.
- "load", "step", "result": {rank: action}, or {"replica/rank": action} for one replica. Actions: "mistake", "error", "kill", "stop",
  "hang", "end" (with status 0). Those of "step" and "result" happen at step 3.
- "adapters": {rank: why it cannot read an adapter}.
- "until": a file that must exist before an action happens.
- "pause": seconds that each of a step's "collectives" (default 1) takes.

Imports neither torch nor pytest: every rank of every test would wait seconds for them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.distributed.rank_process import BOOT_CODE
from compile_and_serve.runtime.engine.process import BOOT_CODE as ENGINE_CODE
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput, StateGroupInfo, WorkerInfo, WorkerStats

if TYPE_CHECKING:
    import pytest

ORDERS = "fake-worker.json"
_FAKE = "import tests.support.fake_worker\ntests.support.fake_worker.install()\n"
FAKE_BOOT_CODE = BOOT_CODE.replace(
    "from compile_and_serve.runtime.distributed.rank_process", _FAKE + "from compile_and_serve.runtime.distributed.rank_process"
)
FAKE_ENGINE_CODE = ENGINE_CODE.replace(
    "from compile_and_serve.runtime.engine.process",
    _FAKE
    + "import compile_and_serve.runtime.distributed.local_ranks\n"
    + "compile_and_serve.runtime.distributed.local_ranks.BOOT_CODE = tests.support.fake_worker.FAKE_BOOT_CODE\n"
    + "from compile_and_serve.runtime.engine.process",
)


def use_fake_workers(monkeypatch: pytest.MonkeyPatch, model_dir: Path, **orders: Any) -> None:
    """Rank processes, and engine processes with one rank, start with fake workers."""
    monkeypatch.setattr("compile_and_serve.runtime.distributed.local_ranks.BOOT_CODE", FAKE_BOOT_CODE)
    monkeypatch.setattr("compile_and_serve.runtime.engine.client.BOOT_CODE", FAKE_ENGINE_CODE)
    give_orders(model_dir, **orders)


def give_orders(model_dir: Path, **orders: Any) -> None:
    (model_dir / ORDERS).write_text(json.dumps(orders))


def install() -> None:
    """Replace, in this process, the worker and the counter of collectives that `rank_process` imports."""
    sys.modules["compile_and_serve.runtime.runner.worker"] = sys.modules["compile_and_serve.custom_ops.collectives.collectives"] = (
        sys.modules[__name__]
    )


_num_entered = 0


def collectives_entered() -> int:
    """Like the function of this name in compile_and_serve.custom_ops.collectives.collectives."""
    return _num_entered


class FakeStep:
    def __init__(self, step: int, ids: list[str], before: Callable[[], None]) -> None:
        self.step, self._ids, self._before = step, ids, before

    def result(self) -> ModelRunnerOutput:
        self._before()
        tokens = {request_id: [self.step] for request_id in self._ids}
        return ModelRunnerOutput(step=self.step, sampled_token_ids=tokens, logprobs={}, prompt_logprobs={}, errors={})


class Worker:
    """Has room for 100 - 10 · rank blocks. `padded_tokens` of its stats is the number of blocks that it was given."""

    def __init__(self, config: EngineConfig, rank: Rank, on_stage: Callable[[str, float, str], None], **_: object) -> None:
        self._orders = json.loads((config.model.path / ORDERS).read_text())
        self._rank, self._replica = rank.index, config.parallel.data_parallel_rank
        self.runner = None
        self._idle_work = self._orders.get("idle", 2)
        self._num_launched = 0
        self._is_gpu = is_gpu = self._orders.get("device", "cpu") != "cpu"  # then a thread waits for results
        self.adapters = SimpleNamespace(load=self._read_adapter, drop=lambda _: None)
        self.platform = SimpleNamespace(
            is_asynchronous=is_gpu, shares_host_memory=not is_gpu, make_current=lambda: None, release_cached=lambda: None
        )
        on_stage("compile", 0.25, "a piece")
        if folder := self._orders.get("devices"):
            (Path(folder) / f"{self._replica}-{rank.index}").write_text(f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {rank.device_index}")
        on_stage("load", 0.5, f"by rank {rank.index}")
        self._obey("load")
        windows = self._orders.get("windows", {})
        self.info = WorkerInfo(
            num_blocks=100 - 10 * rank.index,
            block_size=self._orders.get("block_sizes", {}).get(str(rank.index), config.cache.tokens_per_block),
            page_bytes=1024,
            is_asynchronous=is_gpu,
            has_idle_tasks=is_gpu,
            device="fake",
            dtype="float32",
            max_model_len=256,
            vocab_size=320,
            groups=[StateGroupInfo("tokens", block_size=config.cache.tokens_per_block, window=windows.get(str(rank.index)))],
            compile_report={"rank": rank.index},
        )

    def start(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def launch(self, scheduled: SchedulerOutput) -> FakeStep:
        global _num_entered
        if folder := self._orders.get("record"):
            with (Path(folder) / str(self._rank)).open("a") as file:
                file.write(f"{scheduled.step} {sorted(scheduled.num_scheduled_tokens)}\n")
        self._note("step")
        self._num_launched += 1
        for _ in range(self._orders.get("collectives", 1)):
            time.sleep(self._orders.get("pause", 0))
            _num_entered += 1
        is_third = scheduled.step == 3
        if is_third:
            self._obey("step")
        return FakeStep(scheduled.step, list(scheduled.num_scheduled_tokens), lambda: self._obey("result") if is_third else None)

    def result(self, step: FakeStep) -> ModelRunnerOutput:
        return step.result()

    def idle(self, *, requests_wait: bool = False) -> bool:
        self._note("capture" if requests_wait else "idle")
        if requests_wait:
            return False
        self._idle_work -= 1
        if self._idle_work >= 0:
            time.sleep(self._orders.get("pause", 0))
        return self._idle_work >= 0

    def _read_adapter(self, adapter: LoRARequest) -> Future[None]:
        reading: Future[None] = Future()
        sentence = self._orders.get("adapters", {}).get(str(self._rank))
        if sentence is None:
            reading.set_result(None)
        else:
            reading.set_exception(AdapterError(sentence))
        return reading

    def sleep(self, level: int) -> None:
        """As if memory were freed."""

    def close(self) -> None: ...

    def stats(self) -> WorkerStats:
        pending_work = {"captures": self._idle_work} if self._is_gpu and self._idle_work > 0 else {}
        due = self._num_launched if self._orders.get("captures") == "due" else 0
        return WorkerStats(padded_tokens=self._num_blocks, captures_due=due, pending_work=pending_work)

    def _note(self, what: str) -> None:
        if folder := self._orders.get("timeline"):
            with (Path(folder) / f"{self._replica}-{self._rank}").open("a") as file:
                file.write(what + "\n")

    def _obey(self, moment: str) -> None:
        orders = self._orders.get(moment, {})
        what = orders.get(f"{self._replica}/{self._rank}", orders.get(str(self._rank)))
        while what is not None and (file := self._orders.get("until")) and not Path(file).exists():
            time.sleep(0.01)
        if what == "mistake":
            raise ValueError("the checkpoint is wrong: take another.")
        if what == "error":
            raise RuntimeError("connection closed by peer")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "end":
            os._exit(0)
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "hang":
            time.sleep(600)
