"""Work folders of killed processes are removed; those of running processes are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.compiler.artifacts.work_folder import WorkFolder, is_in_use
from compile_and_serve.compiler.pipeline import WORK_PREFIX
from tests.support.tiny_models import tiny_spec

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys, time
from pathlib import Path
from compile_and_serve.compiler.artifacts.work_folder import WorkFolder
folder = WorkFolder(sys.argv[1], Path(sys.argv[2]))
(Path(folder.name) / "kernel").write_text("half of")
print(folder.name, flush=True)
time.sleep(600)
"""


@contextmanager
def in_another_process(prefix: str, parent: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    command = [sys.executable, "-c", SCRIPT, prefix, str(parent)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
    finally:
        process.kill()
        process.wait()


def test_a_folder_is_removed_when_its_process_was_killed(tmp_path: Path) -> None:
    (tmp_path / "work-not-ours").mkdir()  # has no lock
    with in_another_process("work-", tmp_path) as (folder, process):
        assert is_in_use(folder)
        with WorkFolder("work-", tmp_path):
            assert (folder / "kernel").exists()
        process.kill()
        process.wait()
        assert not is_in_use(folder)
        with WorkFolder("other-", tmp_path):
            assert folder.exists()
        with WorkFolder("work-", tmp_path) as mine:
            assert is_in_use(Path(mine))
            assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["work-not-ours"]


def test_the_next_compilation_removes_the_folders_of_a_killed_one(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "piece").mkdir(parents=True)
    with in_another_process(WORK_PREFIX, tmp_path) as (work, _), in_another_process(".new-", store / "piece") as (new, _):
        assert ArtifactStore(store).leftovers() == []  # it is being written
    assert ArtifactStore(store).leftovers() == [new]
    config = CompileConfig(cache_dir=store, work_dir=tmp_path)
    model = compile_model(
        tiny_spec(layers=1), config, device=torch.device("cpu"), dtype=torch.float32, kernels=frozenset({"rope_attention", "fused_linear"})
    )
    assert not work.exists()
    assert not new.exists()
    del model
