"""A real server that is given adapter folders which somebody prepared: each load is a 400, and nobody else notices."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve.runtime.lora.peft_files import CONFIG_FILE, TENSOR_FILE
from tests.support.adapters import write_adapter
from tests.support.health_probe import HealthProbe
from tests.support.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

OPTIONS = ("--port", "0", "--dtype", "float32", "--device", "cpu", "--max-model-len", "64", "--num-threads", "1")
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-cpu-loras", "4", "--served-model-name", "base")
MAX_HEALTH_MS = 2000.0  # the tests' own load shares the cores


def config(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / CONFIG_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def content(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def special(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def rewrite(folder: Path) -> None:
        stored = load_file(folder / TENSOR_FILE)
        name = next(name for name in stored if "lora_B" in name)
        save_file(stored | {name: change(stored[name])}, folder / TENSOR_FILE)

    return rewrite


HOSTILE: dict[str, Callable[[Path], object]] = {
    "deep config": content(CONFIG_FILE, b'{"a":' * 100_000),
    "deep header": content(TENSOR_FILE, (50_000).to_bytes(8, "little") + b"[" * 50_000),
    "rank of 400 digits": config(r=10**400),
    "alpha of 400 digits": config(lora_alpha=10**400),
    "alphas of 400 digits": config(alpha_pattern={"q_proj": 10**400}),
    "pipe as config": special(CONFIG_FILE, os.mkfifo),
    "pipe as tensors": special(TENSOR_FILE, os.mkfifo),
    "endless config": special(CONFIG_FILE, lambda path: path.symlink_to("/dev/zero")),
    "endless tensors": special(TENSOR_FILE, lambda path: path.symlink_to("/dev/zero")),
    "folder as tensors": special(TENSOR_FILE, Path.mkdir),
    "memory as config": special(CONFIG_FILE, lambda path: path.symlink_to("/proc/self/mem")),
    "a terabyte of nothing": lambda folder: os.truncate(folder / TENSOR_FILE, 1 << 40),
    "cut": lambda folder: os.truncate(folder / TENSOR_FILE, 3000),
    "not a number": tensors(lambda tensor: tensor * float("nan")),
    "infinite": tensors(lambda tensor: tensor / 0),
    "integers": tensors(lambda tensor: tensor.int()),
    "no pattern": config(rank_pattern={"(": 2}),
}
ENDLESS_PATTERNS = config(rank_pattern={r"(([a-z_.])+)+\d!": 2}, alpha_pattern={"(.*)*!": 2}, target_modules=r"(([a-z_.])+)+\d!")


@pytest.fixture(scope="module", params=[(), ("--tensor-parallel-size", "2")], ids=["one rank", "two ranks"])
def server(request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "good", tiny_llama_dir, 8)
    for name, change in {**HOSTILE, "endless patterns": ENDLESS_PATTERNS}.items():
        change(write_adapter(folder / name, tiny_llama_dir, 8))
    write_adapter(folder / "victim", tiny_llama_dir, 8)
    flags = ("--lora-dir", str(folder), "--allow-lora-without-admin-key", "--cache-dir", str(tmp_path_factory.mktemp("cache")))
    server = ServerProcess(str(tiny_llama_dir), *OPTIONS, *LORA, *flags, *request.param)
    server.folder = folder  # type: ignore[attr-defined]
    yield server
    assert server.stop() == 0, server.output


def load(server: ServerProcess, name: str, path: str) -> tuple[int, str]:
    with server.client() as client:
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
    return answer.status_code, answer.json()["error"]["message"] if answer.status_code != 200 else ""


def complete(server: ServerProcess, model: str) -> int:
    with server.client() as client:
        return client.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 4, "temperature": 0}).status_code


@pytest.mark.exhaustive
def test_hostile_folders_are_400s_and_nobody_else_notices(server: ServerProcess) -> None:
    with HealthProbe(server.url) as probe, ThreadPoolExecutor(4) as pool:
        answers = dict(zip(HOSTILE, pool.map(lambda name: load(server, f"adapter {name}", name), HOSTILE), strict=True))
        others = list(pool.map(lambda _: complete(server, "base"), range(8)))
        assert load(server, "patterns", "endless patterns") == (200, "")
        assert load(server, "good", "good") == (200, "")
        assert [complete(server, name) for name in ("good", "patterns", "base")] == [200] * 3
    for name, (status, message) in answers.items():
        assert status == 400, (name, message, server.output[-3000:])
        assert message.endswith("."), name
        assert "could not be read (" not in message, (name, message)  # an exception that nobody expected
    assert others == [200] * 8
    print(json.dumps({"abuse": "adapter folders", **probe.figures}))
    assert set(probe.statuses) == {200}
    assert probe.figures["health_p99_ms"] < MAX_HEALTH_MS


@pytest.mark.exhaustive
def test_files_that_are_cut_while_they_are_read(server: ServerProcess) -> None:
    """A mapped file would end the engine by SIGBUS. Requests read an adapter again when others took its place in host memory."""
    file = server.folder / "victim" / TENSOR_FILE  # type: ignore[attr-defined]
    whole, generator = file.read_bytes(), random.Random(3)
    statuses = set()
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            file.write_bytes(whole)
            loading = pool.submit(load, server, f"victim {number}", "victim")
            for _ in range(200):
                os.truncate(file, generator.randrange(len(whole)))
                file.write_bytes(whole)
            statuses.add(loading.result()[0])
    assert statuses <= {200, 400}
    assert complete(server, "base") == 200
