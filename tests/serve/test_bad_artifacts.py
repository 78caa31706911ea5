"""With unusable artifacts, the command line logs one sentence and still answers."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compile_and_serve.compiler.artifacts.store import MANIFEST, ArtifactStore, key_of
from compile_and_serve.serve.cli.main import app

ENGINE = ["--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    names = (None, "compile_and_serve")
    before = [(logger, logger.level, logger.handlers[:]) for logger in map(logging.getLogger, names)]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def generate(model: Path, *options: str) -> tuple[str, str]:
    """(answer, log) of `generate`, which must succeed."""
    result = CliRunner().invoke(app, ["generate", str(model), "the one", "--max-tokens", "6", *ENGINE, *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout, " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def made(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the model's artifacts."""
    store = tmp_path_factory.mktemp("made") / "store"
    generate(tiny_llama_dir, "--cache-dir", str(store))
    return store


@pytest.fixture(scope="module")
def answer(tiny_llama_dir: Path) -> str:
    return generate(tiny_llama_dir, "--eager")[0]


def of_another_device(store: Path) -> None:
    for entry in ArtifactStore(store).entries():
        manifest = entry.manifest
        manifest["fields"] |= {"device": "cuda", "capability": "sm_90 NVIDIA H200"}
        (entry.path / MANIFEST).write_text(json.dumps(manifest))
        entry.path.rename(entry.path.with_name(key_of(manifest["fields"])))


def of_another_model(store: Path) -> None:
    for entry in ArtifactStore(store).entries():
        manifest = entry.manifest
        changed = {"config": "another"} if entry.kind == "plan" else {"fingerprint": "another"}
        manifest["fields"] |= changed
        (entry.path / MANIFEST).write_text(json.dumps(manifest))
        entry.path.rename(entry.path.with_name(key_of(manifest["fields"]) + entry.key[:4]))


def cut_short(store: Path) -> None:
    """Leave half a file and an unfinished folder, as a crash during a write can."""
    for entry in ArtifactStore(store).entries():
        if entry.kind == "piece":
            source = entry.path / "piece.py"
            source.write_text(source.read_text()[: source.stat().st_size // 2])
    unfinished = store / "piece" / ".new-killed" / "artifact"
    unfinished.mkdir(parents=True)
    (unfinished / "piece.py").write_text("import")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (of_another_device, ['does not fit this plan: the nearest plan differs in device ("cuda" there, "cpu" here), capability']),
        (of_another_model, ['does not fit this plan: the nearest plan differs in config ("another" there']),
        (cut_short, ["Not using an artifact: piece", "the checksum of piece.py is not the manifest's. It is rebuilt."]),
    ],
)
def test_an_artifact_that_must_not_be_used(
    tiny_llama_dir: Path, made: Path, answer: str, tmp_path: Path, damage: Callable[[Path], None], messages: list[str]
) -> None:
    artifact, cache = tmp_path / "artifact", tmp_path / "cache"
    shutil.copytree(made, artifact)
    damage(artifact)
    text, log = generate(tiny_llama_dir, "--artifact", str(artifact), "--cache-dir", str(cache))
    for message in messages:
        assert message in log
    assert text == answer
    text, log = generate(tiny_llama_dir, "--cache-dir", str(cache))  # uses the rebuilt artifact
    assert "load artifact" in log
    assert "Not using" not in log
    assert text == answer


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["no space"])
@pytest.mark.parametrize("obstacle", ["a file in the way", "no space"])
def test_a_cache_folder_that_cannot_be_written(
    tiny_llama_dir: Path, answer: str, tmp_path: Path, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reason = tmp_path / "cache", "Not a directory"
    if obstacle == "a file in the way":
        cache.write_text("not a folder")
    else:
        reason = "No space left on device"

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, reason)

        monkeypatch.setattr("compile_and_serve.compiler.artifacts.store._sync", full)  # where a full disk is noticed at the latest
    text, log = generate(tiny_llama_dir, "--cache-dir", str(cache))
    assert "Artifacts cannot be written to" in log
    assert reason in log
    assert "so the next start compiles again" in log
    assert text == answer
