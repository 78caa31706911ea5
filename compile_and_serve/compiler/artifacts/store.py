"""The artifact store: content-addressed folders with a manifest, written atomically, checked before use.

    <root>/<kind>/<key>/manifest.json     schema, the key's fields in clear text, and every file's SHA-256
    <root>/<kind>/<key>/…                 the files

`key` is a hash of the fields, so that a folder may be copied to another machine: it is used where the fields are equal, and
where they are not, the manifest says which one differs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

SCHEMA = 1
FIRST_WORD_SECONDS, NEXT_WORD_SECONDS = 10.0, 60.0  # of waiting for another process
MANIFEST = "manifest.json"


class ArtifactError(RuntimeError):
    """An artifact that must not be used: damaged, or of another schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One artifact in a store."""

    kind: str
    key: str
    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.path / MANIFEST).read_text())

    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def last_used(self) -> float:
        """Seconds since the epoch when it was made or last read."""
        return (self.path / MANIFEST).stat().st_mtime

    def remove(self) -> None:
        """Delete the artifact; a process that has loaded it goes on."""
        shutil.rmtree(self.path)

    def verify(self) -> None:
        """Raise `ArtifactError` unless every file is there with the checksum that the manifest gives."""
        try:
            manifest = self.manifest
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{self.kind} {self.key} has no readable manifest ({error})") from error
        if manifest.get("schema") != SCHEMA:
            raise ArtifactError(f"{self.kind} {self.key} has schema {manifest.get('schema')}, expected {SCHEMA}")
        for name, digest in manifest["files"].items():
            file = self.path / name
            if not file.is_file():
                raise ArtifactError(f"{self.kind} {self.key} lacks its file {name}")
            if _digest(file) != digest:
                raise ArtifactError(f"{self.kind} {self.key}: the checksum of {name} is not the manifest's")


def key_of(fields: Mapping[str, Any]) -> str:
    """32 hex digits over the fields' canonical JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def default_root() -> Path:
    """The user's artifact folder: $XDG_CACHE_HOME (or ~/.cache)/compile-and-serve/artifacts."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "compile-and-serve" / "artifacts"


class ArtifactStore:
    """Artifacts below one folder. A store that cannot be written is used read-only, which is logged once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writable: bool | None = None

    def path(self, kind: str, fields: Mapping[str, Any]) -> Path:
        """Where the artifact with these fields lies, if it is there."""
        return self.root / kind / key_of(fields)

    def get(self, kind: str, fields: Mapping[str, Any]) -> Entry | None:
        """The verified artifact with these fields, or None. A damaged one is logged with its reason, and removed if possible."""
        entry = Entry(kind=kind, key=key_of(fields), path=self.path(kind, fields))
        if not (entry.path / MANIFEST).exists():
            return None
        try:
            entry.verify()
        except ArtifactError as error:
            log.warning("Not using an artifact: %s. It is made again.", error)
            shutil.rmtree(entry.path, ignore_errors=True)
            return None
        with contextlib.suppress(OSError):  # a store on a read-only disk keeps no record of its use
            os.utime(entry.path / MANIFEST)
        return entry

    def put(self, kind: str, fields: Mapping[str, Any], content: Path, *, replaces: bool = False) -> Entry | None:
        """Keep a copy of the folder `content` under the fields' key; None (and one warning) where the store cannot be written.

        replaces: it takes the place of a whole one, too, which else stays.
        """
        target = self.path(kind, fields)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as folder:
                staged = Path(folder) / "artifact"
                shutil.copytree(content, staged)
                files = {str(f.relative_to(staged)): _digest(f) for f in sorted(staged.rglob("*")) if f.is_file()}
                manifest = {"schema": SCHEMA, "kind": kind, "fields": dict(fields), "files": files}
                (staged / MANIFEST).write_text(json.dumps(manifest, indent=1))
                _sync(staged)
                if replaces:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(target, Path(folder) / "replaced")
                self._move(staged, target)
        except OSError as error:
            if self._writable is not False:
                log.warning(
                    "Cannot keep artifacts in %s (%s); they will be made again at the next start.", self.root, error
                )
            self._writable = False
            return None
        return Entry(kind=kind, key=target.name, path=target)

    def _move(self, staged: Path, target: Path) -> None:
        """One whole artifact stays: another process may be reading the one that is there, and one may be put by two at once."""
        there = Entry(kind=target.parent.name, key=target.name, path=target)
        for _ in range(2):
            if target.exists():
                with contextlib.suppress(ArtifactError):
                    there.verify()
                    return
                shutil.rmtree(target, ignore_errors=True)
            try:
                os.rename(staged, target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise OSError(errno.ENOTEMPTY, "others keep putting it", str(target))

    @contextmanager
    def lock(self, fields: Mapping[str, Any]) -> Iterator[None]:
        """Held while an artifact is made, so that a second process waits for it instead of making it too; it says so as long as it does."""
        try:
            folder = self.root / ".locks"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{key_of(fields)}.lock")
            waits = [FIRST_WORD_SECONDS]
            while True:
                try:
                    lock.acquire(timeout=waits[-1])
                    break
                except Timeout:
                    log.warning(
                        "Still waiting for another process that compiles the same model and holds %s (%.0f s).",
                        lock.lock_file, sum(waits),
                    )  # fmt: skip
                    waits.append(NEXT_WORD_SECONDS)
        except OSError as error:
            log.warning("Cannot lock the artifact store %s (%s); going on without it.", self.root, error)
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """Every artifact, whether it is whole or not, by kind and key."""
        folders = [manifest.parent for manifest in sorted(self.root.glob(f"*/*/{MANIFEST}"))]
        return [Entry(kind=f.parent.name, key=f.name, path=f) for f in folders if not f.name.startswith(".")]

    def leftovers(self) -> list[Path]:
        """Folders that an interrupted write left behind."""
        return sorted(self.root.glob("*/.new-*"))

    def explain_miss(self, kind: str, fields: Mapping[str, Any]) -> str | None:
        """Which fields of the nearest artifact of this kind differ, as a sentence; None where there is none."""
        best: list[str] | None = None
        for entry in self.entries():
            if entry.kind != kind:
                continue
            try:
                theirs = entry.manifest.get("fields", {})
            except (OSError, ValueError):
                continue
            differing = [name for name in fields if theirs.get(name) != fields[name]]
            if best is None or len(differing) < len(best):
                best = [f"{name} ({_short(theirs.get(name))} there, {_short(fields[name])} here)" for name in differing]
        return None if best is None else f"the nearest {kind} differs in {', '.join(best)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Have the files on disk before the rename makes them visible."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
