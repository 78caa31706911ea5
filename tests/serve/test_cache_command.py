"""`compile-and-serve cache`: listing, verification and removal of artifacts and measurements."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.custom_ops.tuning import store as tuning
from compile_and_serve.runtime.connector.tiers.disk_folder import DiskFolder
from compile_and_serve.serve.cli.cache_command import cache_app


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    content = tmp_path / "content"
    content.mkdir()
    (content / "piece.py").write_text("text")
    store = ArtifactStore(tmp_path / "store")
    for name, version in (("mine", torch.__version__), ("theirs", "1.0.0")):
        store.put("piece", {"fingerprint": name, "torch": f"{version} (abc)", "capability": "AVX512"}, content)
    return store


def run(*arguments: str, store: ArtifactStore) -> tuple[int, str]:
    result = CliRunner().invoke(cache_app, [*arguments, "--cache-dir", str(store.root)])
    return result.exit_code, result.output


def test_ls_names_every_artifact(store: ArtifactStore) -> None:
    code, output = run("ls", store=store)
    assert code == 0
    assert "mine" in output
    assert "theirs" in output


def test_verify_finds_damage(store: ArtifactStore) -> None:
    assert run("verify", store=store) == (0, f"2 intact, 0 damaged in {store.root}\n")
    (store.entries()[0].path / "piece.py").write_text("tampered")
    code, output = run("verify", store=store)
    assert code == 1
    assert "the checksum of piece.py is not the manifest's" in output


def test_prune_keeps_usable_artifacts(store: ArtifactStore) -> None:
    (store.root / "piece" / ".new-abc").mkdir()
    assert "removed 1 artifacts" in run("prune", store=store)[1]
    assert [entry.manifest["fields"]["fingerprint"] for entry in store.entries()] == ["mine"]
    assert not store.leftovers()
    assert "removed 1 artifacts" in run("prune", "--all", store=store)[1]
    assert store.entries() == []


@pytest.fixture
def measurements(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two problems that were measured with the kernels as they are, one that was measured with others."""
    folder = tuning.tuning_folder(store.root)
    for problem in ("x", "y"):
        tuning.MeasurementStore(folder, "quantized_linear", "NVIDIA H200").put(problem, {"gemv": [1e-6]})
    with monkeypatch.context() as patch:
        patch.setattr(tuning, "kernel_digest", lambda: "edited")
        tuning.MeasurementStore(folder, "allreduce", "NVIDIA H200").put("x", {"nccl": [1e-6]})
    return folder


@pytest.mark.usefixtures("measurements")
def test_ls_names_what_was_measured(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, output = run("ls", store=store)
    assert code == 0
    rows = {cells[0]: cells for line in output.splitlines() if len(cells := line.strip("│ ").split(" │ ")) == 5}
    rows = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert rows["quantized_linear"] == ["quantized_linear", "NVIDIA H200", "2", torch.__version__, "current"]
    assert rows["allreduce"] == ["allreduce", "NVIDIA H200", "1", torch.__version__, "stale: not read"]


def test_prune_keeps_current_measurements(store: ArtifactStore, measurements: Path) -> None:
    assert "removed 1 measurements" in run("prune", store=store)[1]
    assert [file.kind for file in tuning.stored_files(measurements)] == ["quantized_linear"]
    assert "removed 2 measurements" in run("prune", "--all", store=store)[1]
    assert list(measurements.iterdir()) == []


def test_blocks_of_kv_caches_are_listed_and_removed(tmp_path: Path) -> None:
    folder = DiskFolder(tmp_path, bytes([7]) * 32, 0, 1 << 30)
    for number in range(3):
        folder.write(bytes([number]) * 32, [memoryview(bytes(4096))])
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    os.utime(kept[0], (0, 0))
    kept[1].rename(f"{kept[1]}.1.2.part")
    os.utime(f"{kept[1]}.1.2.part", (0, 0))

    def cache(*arguments: str) -> str:
        result = CliRunner().invoke(cache_app, [*arguments, "--kv-offload-dir", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.output

    assert re.search(r"070707070707 .* 3 .* 0 ", cache("ls"))
    assert "removed 1 files" in cache("prune")
    assert "removed 1 files" in cache("prune", "--older-than", "1")
    assert "removed 1 files" in cache("prune", "--all")
