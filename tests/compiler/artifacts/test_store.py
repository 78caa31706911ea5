"""The artifact store: damaged artifacts are not used, interrupted writes leave nothing, and a miss is explained."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig, compile_model, pipeline
from compile_and_serve.compiler.artifacts.store import MANIFEST, ArtifactError, ArtifactStore, Entry
from compile_and_serve.compiler.inductor import PieceCompileError
from tests.support.forkserver import forkserver
from tests.support.tiny_models import caches, fill, step, tiny_spec

FIELDS = {"torch": "2.13.0", "fingerprint": "abc"}
CPU = torch.device("cpu")
FUSED = frozenset({"rope_attention", "fused_linear"})


@pytest.fixture
def content(tmp_path: Path) -> Path:
    folder = tmp_path / "content"
    (folder / "kernels").mkdir(parents=True)
    (folder / "piece.py").write_text("text")
    (folder / "kernels" / "a.so").write_bytes(b"\x7fELF" * 100)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


def test_get_returns_what_put_wrote(store: ArtifactStore, content: Path) -> None:
    assert store.get("piece", FIELDS) is None
    store.put("piece", FIELDS, content)
    entry = store.get("piece", FIELDS)
    assert entry is not None
    assert (entry.path / "kernels" / "a.so").read_bytes() == (content / "kernels" / "a.so").read_bytes()
    assert entry.manifest["fields"] == FIELDS
    assert [e.key for e in store.entries()] == [entry.key]


def test_a_store_may_be_copied(store: ArtifactStore, content: Path, tmp_path: Path) -> None:
    store.put("piece", FIELDS, content)
    store.root.rename(tmp_path / "moved")
    assert ArtifactStore(tmp_path / "moved").get("piece", FIELDS) is not None


def test_an_intact_artifact_is_not_replaced(store: ArtifactStore, content: Path) -> None:
    """Another process may be reading it."""
    entry = store.put("piece", FIELDS, content)
    assert entry is not None
    read = (entry.path / "piece.py").stat()
    assert store.put("piece", FIELDS, content) == entry
    assert (entry.path / "piece.py").stat().st_ino == read.st_ino
    (entry.path / "piece.py").write_text("damaged")
    assert store.put("piece", FIELDS, content) == entry
    assert (entry.path / "piece.py").read_text() == "text"
    assert not store.leftovers()


def test_concurrent_puts_leave_one_intact_artifact(store: ArtifactStore, content: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(lambda i: store.put("piece", FIELDS, content), range(24)))
    assert len(set(entries)) == 1
    assert store.get("piece", FIELDS) == entries[0] is not None
    assert not caplog.records


def test_waiting_for_another_process_is_logged(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("compile_and_serve.compiler.artifacts.store.FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr("compile_and_serve.compiler.artifacts.store.NEXT_WAIT_SECONDS", 0.01)
    said = threading.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)

    def wait() -> str:
        with ArtifactStore(store.root).lock(FIELDS):
            return "held"

    with ThreadPoolExecutor(1) as threads:
        with store.lock(FIELDS):
            waiting = threads.submit(wait)
            assert said.wait(60)
            assert not waiting.done()
        assert waiting.result(60) == "held"
    assert "Still waiting for another process" in caplog.text
    assert str(store.root / ".locks") in caplog.text


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "manifest", "schema"])
def test_a_damaged_artifact_is_not_used(store: ArtifactStore, content: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    entry = store.put("piece", FIELDS, content)
    assert entry is not None
    kernel = entry.path / "kernels" / "a.so"
    if damage == "truncate":
        kernel.write_bytes(kernel.read_bytes()[:-1])
    elif damage == "flip":
        kernel.write_bytes(b"\x7eELF" + kernel.read_bytes()[4:])
    elif damage == "delete":
        kernel.unlink()
    elif damage == "manifest":
        (entry.path / MANIFEST).write_text("{")
    else:
        manifest = entry.manifest | {"schema": 0}
        (entry.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError):
        entry.verify()
    with caplog.at_level(logging.WARNING):
        assert store.get("piece", FIELDS) is None
    assert "Not using an artifact: piece" in caplog.text
    assert store.put("piece", FIELDS, content) is not None
    assert store.get("piece", FIELDS) is not None


def test_a_miss_names_the_field_that_differs(store: ArtifactStore, content: Path) -> None:
    assert store.explain_miss("piece", FIELDS) is None
    store.put("piece", FIELDS, content)
    reason = store.explain_miss("piece", FIELDS | {"torch": "2.11.0"})
    assert reason == 'the nearest piece differs in torch ("2.13.0" there, "2.11.0" here)'


@pytest.mark.parametrize("obstacle", ["a file in the way", "no space"])
def test_an_unwritable_store_is_one_warning_and_no_error(
    tmp_path: Path, content: Path, obstacle: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(tmp_path / "store")
    if obstacle == "a file in the way":
        store.root.write_text("not a folder")
    else:

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("compile_and_serve.compiler.artifacts.store.shutil.copytree", full)
    with caplog.at_level(logging.WARNING):
        assert store.put("piece", FIELDS, content) is None
        assert store.put("piece", FIELDS | {"torch": "other"}, content) is None
        with store.lock(FIELDS):
            pass
    assert caplog.text.count("Artifacts cannot be written to") == 1
    assert store.entries() == []
    assert store.leftovers() == []


@pytest.mark.exhaustive
def test_compiling_works_without_a_writable_store(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("not a folder")
    model = compile_model(tiny_spec(layers=1), CompileConfig(cache_dir=tmp_path / "store"), device=CPU, dtype=torch.float32, kernels=FUSED)
    assert model.report["artifact"] == "made"


class _Starts:
    """Starts of one model with a store and perhaps an artifact folder. `spoil` makes an intact piece fail to load."""

    def __init__(self, cache_dir: Path, artifact_dir: Path | None = None) -> None:
        self.spec = tiny_spec(layers=1)
        self.config = CompileConfig(cache_dir=cache_dir, artifact_dir=artifact_dir)

    def start(self) -> tuple[str, torch.Tensor]:
        model = compile_model(self.spec, self.config, device=CPU, dtype=torch.float32, kernels=FUSED)
        fill(model)
        return model.report["artifact"], step(model, [1, 2, 3, 4, 5], 0, caches(self.spec, torch.float32))

    @staticmethod
    def pieces(folder: Path) -> list[Entry]:
        return [entry for entry in ArtifactStore(folder).entries() if entry.kind == "piece"]

    @staticmethod
    def spoil(entry: Entry) -> None:
        source = next(entry.path.glob("*.py"))
        source.write_text("import a_module_that_is_not_here\n")
        manifest = entry.manifest
        manifest["files"][source.name] = hashlib.sha256(source.read_bytes()).hexdigest()
        (entry.path / MANIFEST).write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A store after the first start, of which tests change copies, and that start's logits."""
    folder = tmp_path_factory.mktemp("store")
    return folder, _Starts(folder).start()[1]


@pytest.fixture
def started(first_start: tuple[Path, torch.Tensor], tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A copy of the store after the first start, and that start's logits."""
    return shutil.copytree(first_start[0], tmp_path / "started"), first_start[1]


@pytest.mark.slow
def test_an_artifact_that_cannot_be_loaded_is_rebuilt(started: tuple[Path, torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    """This is noticed while the weights are read, or, if another piece is missing, while the present ones are loaded."""
    folder, expected = started
    starts = _Starts(folder)
    for is_one_missing in (False, True):
        first, second = starts.pieces(folder)[:2]
        starts.spoil(first)
        if is_one_missing:
            second.remove()
        how, logits = starts.start()
        assert how == "made"
        torch.testing.assert_close(logits, expected)
        assert "cannot be loaded (ModuleNotFoundError: No module named 'a_module" in caplog.text
        caplog.clear()
        assert starts.start()[0] == "hit"
        assert not caplog.text


def test_an_artifact_folder_is_not_changed(started: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    ahead, expected = started
    starts = _Starts(tmp_path / "cache", artifact_dir=ahead)
    starts.spoil(starts.pieces(ahead)[0])
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in ahead.rglob("*") if file.is_file()}
    for _ in range(2):
        how, logits = starts.start()
        assert how == "made"
        torch.testing.assert_close(logits, expected)
    after = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in ahead.rglob("*") if file.is_file()}
    assert after == before
    assert len(starts.pieces(tmp_path / "cache")) == len(starts.pieces(ahead))


def test_a_full_disk_removes_no_artifact(started: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = started
    starts = _Starts(folder)

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("compile_and_serve.compiler.artifacts.model_artifacts._copy_if_missing", full)
        patch.setattr("compile_and_serve.compiler.pipeline.start_piece", full)
        with pytest.raises(OSError, match="No space left"):
            starts.start()
    how, logits = starts.start()
    assert how == "hit"
    torch.testing.assert_close(logits, expected)


def test_an_artifact_with_other_choices_is_used_at_the_next_start(
    started: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights were read for the plan whose pieces cannot be loaded."""
    folder, expected = started
    starts = _Starts(folder)
    starts.spoil(starts.pieces(folder)[0])

    make_plan = pipeline.make_plan

    def otherwise(*args: Any) -> Any:
        plan, graphs = make_plan(*args)
        return replace(plan, results=plan.results + plan.results[:1], outputs=(*plan.outputs, "more")), graphs

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "make_plan", otherwise)
        with pytest.raises(PieceCompileError, match="start again to use it"):
            starts.start()
    how, logits = starts.start()
    assert how == "hit"
    torch.testing.assert_close(logits, expected)


def test_a_plan_is_replaced_with_its_pieces(store: ArtifactStore, content: Path) -> None:
    entry = store.put("piece", FIELDS, content)
    assert entry is not None
    (content / "more").write_text("more")
    store.put("piece", FIELDS, content)
    assert not (entry.path / "more").exists()
    store.put("piece", FIELDS, content, replaces=True)
    assert (entry.path / "more").exists()
    assert store.get("piece", FIELDS) is not None
    assert not store.leftovers()


def _start(cache_dir: str, expected: torch.Tensor, report: str, compile_anew: bool = False) -> None:
    """One start of a process: compile or load, compare a step with the expected logits, report whether it was a hit.

    compile_anew: with g++ itself, whatever it has compiled before in this run of the tests.
    """
    if compile_anew:
        os.environ.pop("COMPILED_ONCE", None)
    spec = tiny_spec(layers=1)
    model = compile_model(spec, CompileConfig(cache_dir=Path(cache_dir)), device=CPU, dtype=torch.float32, kernels=FUSED)
    fill(model)
    logits = step(model, [1, 2, 3, 4, 5], 0, caches(spec, torch.float32))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for entry in ArtifactStore(Path(cache_dir)).entries():
        entry.verify()
    Path(report).write_text(model.report["artifact"])


def _expected_logits() -> torch.Tensor:
    spec = tiny_spec(layers=1)
    model = compile_model(spec, CompileConfig(mode="eager"), device=CPU, dtype=torch.float32)
    fill(model)
    return step(model, [1, 2, 3, 4, 5], 0, caches(spec, torch.float32))


@pytest.mark.slow
def test_of_two_processes_one_compiles(tmp_path: Path) -> None:
    context = forkserver()
    expected = _expected_logits()
    reports = [tmp_path / f"report{i}" for i in range(2)]
    both = [context.Process(target=_start, args=(str(tmp_path / "store"), expected, str(r))) for r in reports]
    for process in both:
        process.start()
    for process in both:
        process.join(300)
        assert process.exitcode == 0
    assert sorted(report.read_text() for report in reports) == ["hit", "made"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", [0, 1])
def test_a_start_after_a_kill_at_any_time_is_correct(tmp_path: Path, part: int) -> None:
    """Two cold compilations are killed, each in another quarter of its usual time."""
    context = forkserver()
    expected = _expected_logits()
    _run_to_end(context, tmp_path / "warm-up", expected)  # starts the fork server
    start = time.perf_counter()
    _run_to_end(context, tmp_path / "whole", expected, compile_anew=True)
    seconds = time.perf_counter() - start
    randomness, killed = random.Random(part), 0
    for attempt in range(6):
        store = tmp_path / f"store{attempt}"
        victim = context.Process(target=_start, args=(str(store), expected, str(tmp_path / "unread"), True))
        start = time.perf_counter()
        victim.start()
        victim.join((2 * killed + part + randomness.random()) / 4 * 0.95 * seconds)
        if victim.is_alive():
            victim.kill()
            killed += 1
        else:
            seconds = min(seconds, time.perf_counter() - start)  # the machine is faster now
        victim.join()
        _run_to_end(context, store, expected)
        if killed == 2:
            assert _run_to_end(context, store, expected) == "hit"
            return
    pytest.fail(f"{killed} of 2 compilations were killed: the others ended before their time")


def _run_to_end(context: ForkServerContext, store: Path, expected: torch.Tensor, *, compile_anew: bool = False) -> str:
    """A start that is not killed. → its report of the artifact"""
    report = store.with_name(store.name + "-report")
    process = context.Process(target=_start, args=(str(store), expected, str(report), compile_anew))  # type: ignore[attr-defined]
    process.start()
    process.join(300)
    assert process.exitcode == 0
    return report.read_text()
