"""Damaged artifacts are rebuilt and reported once; unreadable ones are kept; an artifact folder of the user is never changed."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from compile_and_serve.compiler.artifacts import store as store_module
from compile_and_serve.compiler.artifacts.store import MANIFEST, ArtifactError, ArtifactStore, Entry, key_of

FIELDS = {"torch": "2.13.0", "layers": 3, "passes": ["a@1", "b@2"], "fingerprint": None}


@pytest.fixture
def content(tmp_path: Path) -> Path:
    folder = tmp_path / "content"
    (folder / "kernels").mkdir(parents=True)
    (folder / "piece.py").write_text("text")
    (folder / "kernels" / "a.so").write_bytes(b"\x7fELF")
    return folder


def put(root: Path, content: Path) -> Entry:
    entry = ArtifactStore(root).put("piece", FIELDS, content)
    assert entry is not None
    return entry


def snapshot(root: Path) -> dict[Path, tuple[bytes, int]]:
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in root.rglob("*") if file.is_file()}


def test_each_flipped_bit_of_a_manifest_is_found_or_changes_nothing(tmp_path: Path, content: Path) -> None:
    entry = put(tmp_path / "store", content)
    file, manifest = entry.path / MANIFEST, entry.manifest
    original, accepted = file.read_bytes(), 0
    for position in range(8 * len(original)):
        flipped = bytearray(original)
        flipped[position // 8] ^= 1 << position % 8
        file.write_bytes(flipped)
        try:
            entry.verify()
        except ArtifactError:
            continue
        accepted += 1
        assert json.loads(flipped) == manifest, f"bit {position} is flipped: {bytes(flipped)!r}"
    assert accepted < 8 * len(original) / 100


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        json.dumps({"schema": 1}),
        json.dumps({"schema": 1, "kind": "piece", "fields": [], "files": {}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS, "files": []}),
        json.dumps({"schema": 1, "kind": "plan", "fields": FIELDS, "files": {}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS, "files": {}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS, "files": {"a\0b": ""}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS, "files": {"\ud800": ""}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS, "files": {"x" * 1000: ""}}),
        json.dumps({"schema": 1, "kind": "piece", "fields": FIELDS | {"torch": "2.11.0"}, "files": {}}),
    ],
)
def test_a_wrong_manifest_is_reported_once_and_rebuilt(text: str, tmp_path: Path, content: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = put(tmp_path / "store", content)
    (entry.path / MANIFEST).write_text(text)
    store = ArtifactStore(tmp_path / "store")
    store.explain_miss("piece", FIELDS | {"layers": 4})  # raises nothing
    assert store.get("piece", FIELDS) is None
    assert store.get("piece", FIELDS) is None
    assert [record.message.startswith("Not using an artifact: piece") for record in caplog.records] == [True]
    assert store.put("piece", FIELDS, content) is not None
    assert store.get("piece", FIELDS) == ArtifactStore(tmp_path / "store").get("piece", FIELDS) == entry


@pytest.mark.parametrize("what", ["a folder", "a loop", "a file instead of the artifact"])
def test_a_manifest_that_is_not_a_file(what: str, tmp_path: Path, content: Path) -> None:
    entry = put(tmp_path / "store", content)
    manifest = entry.path / MANIFEST
    manifest.unlink()
    if what == "a folder":
        manifest.mkdir()
    elif what == "a loop":
        manifest.symlink_to(manifest)
    else:
        store_module.shutil.rmtree(entry.path)
        entry.path.write_text("")
    store = ArtifactStore(tmp_path / "store")
    assert store.get("piece", FIELDS) is None
    assert store.put("piece", FIELDS, content) == entry
    assert store.get("piece", FIELDS) == entry


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM])
def test_an_artifact_that_the_machine_cannot_read_is_kept(
    number: int, tmp_path: Path, content: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = put(tmp_path / "store", content)
    before = snapshot(entry.path)
    store = ArtifactStore(tmp_path / "store")

    def fails(file: Path) -> str:
        raise OSError(number, "it fails", str(file))

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_digest", fails)
        assert store.get("piece", FIELDS) is None
        assert store.get("piece", FIELDS) is None
    assert store.put("piece", FIELDS, content, replaces=True) is None
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text
    assert snapshot(entry.path) == before
    assert ArtifactStore(tmp_path / "store").get("piece", FIELDS) == entry


@pytest.mark.parametrize("damage", ["none", "manifest", "file"])
def test_a_read_only_store_is_not_changed(damage: str, tmp_path: Path, content: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = put(tmp_path / "store", content)
    if damage != "none":
        (entry.path / {"manifest": MANIFEST, "file": "piece.py"}[damage]).write_text("{")
    before = snapshot(tmp_path / "store")
    store = ArtifactStore(tmp_path / "store", read_only=True)
    for _ in range(2):
        assert store.get("piece", FIELDS) == (entry if damage == "none" else None)
    assert store.put("piece", FIELDS, content, replaces=True) is None
    with store.lock(FIELDS):
        pass
    assert snapshot(tmp_path / "store") == before
    assert not (tmp_path / "store" / ".locks").exists()
    assert len(caplog.records) == (damage != "none")


def test_a_file_that_the_manifest_does_not_list_is_damage(tmp_path: Path, content: Path) -> None:
    entry = put(tmp_path / "store", content)
    (entry.path / "kernels" / "b.so").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"a file kernels/b\.so that its manifest does not list"):
        entry.verify()


def test_an_artifact_under_another_key_is_damage(tmp_path: Path, content: Path) -> None:
    """As after a flipped bit in the name of its folder."""
    entry = put(tmp_path / "store", content)
    other = FIELDS | {"layers": 4}
    entry.path.rename(entry.path.with_name(key_of(other)))
    assert ArtifactStore(tmp_path / "store").get("piece", other) is None


def test_a_file_in_the_place_of_the_cache_is_one_sentence(tmp_path: Path, content: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store").write_text("")
    store = ArtifactStore(tmp_path / "store")
    assert store.get("piece", FIELDS) is None
    with store.lock(FIELDS):
        assert store.put("piece", FIELDS, content) is None
    assert len(caplog.records) == 1
    assert "Artifacts cannot be written to" in caplog.text


def test_an_artifact_that_another_process_has_rebuilt_is_used(tmp_path: Path, content: Path) -> None:
    entry = put(tmp_path / "store", content)
    (entry.path / "piece.py").write_text("damaged")
    store = ArtifactStore(tmp_path / "store")
    assert store.get("piece", FIELDS) is None
    put(tmp_path / "store", content)
    assert store.get("piece", FIELDS) == entry
