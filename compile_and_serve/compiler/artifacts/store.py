"""The artifact store: folders named by the hash of their key, written atomically and checked before each use.

    <root>/<kind>/<key>/manifest.json     schema, kind, the fields of the key, and the SHA-256 of every file
    <root>/<kind>/<key>/…                 the files

`key` is a hash of the fields, so an artifact may be copied to another machine. It is used where all fields are equal.
Otherwise a warning names the fields that differ.

An artifact with damaged content is rebuilt. If the machine fails to read it (no permission, a disk error, too many open files),
the artifact is not used and nothing is deleted.
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
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from compile_and_serve.compiler.artifacts.work_folder import WorkFolder, is_in_use

log = logging.getLogger(__name__)

SCHEMA = 1
FIRST_WAIT_SECONDS, NEXT_WAIT_SECONDS = 10.0, 60.0  # between messages while waiting for another process
MANIFEST = "manifest.json"
_STAGING = ".new-"  # prefix of the folders in which artifacts are written
# Errors that the content of an artifact causes. Any other is one of the machine.
_DAMAGE = frozenset({None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG})


class ArtifactError(RuntimeError):
    """The content of an artifact is damaged, or it has another schema."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One artifact in a store."""

    kind: str
    key: str
    path: Path

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest, whose structure has been checked. Raises `ArtifactError` if it is damaged, else `OSError`."""
        with self._damage_as_artifact_error():
            manifest = json.loads((self.path / MANIFEST).read_text())
        if not isinstance(manifest, dict):
            raise ArtifactError(f"{self.kind} {self.key} has a damaged manifest")
        if manifest.get("schema") != SCHEMA:
            raise ArtifactError(f"{self.kind} {self.key} has schema {manifest.get('schema')}, expected {SCHEMA}")
        fields, files = manifest.get("fields"), manifest.get("files")
        is_complete = manifest.keys() == {"schema", "kind", "fields", "files"} and manifest["kind"] == self.kind
        if not is_complete or not isinstance(fields, dict) or not isinstance(files, dict):
            raise ArtifactError(f"{self.kind} {self.key} has a damaged manifest")
        return manifest

    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def last_used(self) -> float:
        """When the artifact was written or last used, in seconds since the epoch."""
        return (self.path / MANIFEST).stat().st_mtime

    def remove(self) -> None:
        """Delete the artifact. Processes that have loaded it are not affected."""
        shutil.rmtree(self.path)

    def verify(self) -> None:
        """Check the key and the checksum of every file. Raises `ArtifactError` for damage, `OSError` if a file cannot be read."""
        manifest = self.manifest
        if key_of(manifest["fields"]) != self.key:
            raise ArtifactError(f"{self.kind} {self.key}: the manifest's fields are those of another key")
        with self._damage_as_artifact_error():
            for name, digest in manifest["files"].items():
                if _digest(self.path / name) != digest:
                    raise ArtifactError(f"{self.kind} {self.key}: the checksum of {name} is not the manifest's")
            for file in _files(self.path):
                if (name := str(file.relative_to(self.path))) not in manifest["files"] and name != MANIFEST:
                    raise ArtifactError(f"{self.kind} {self.key} has a file {name} that its manifest does not list")

    @contextmanager
    def _damage_as_artifact_error(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.kind} {self.key} has a damaged manifest ({error})") from error
        except OSError as error:
            if is_machine_error(error):
                raise
            raise ArtifactError(f"{self.kind} {self.key} is incomplete ({error})") from error


def is_machine_error(error: Exception) -> bool:
    """Whether the machine failed to read an artifact, whose content may be intact."""
    return isinstance(error, OSError) and error.errno not in _DAMAGE


def key_of(fields: Mapping[str, Any]) -> str:
    """32 hex digits over the fields' canonical JSON."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def default_root() -> Path:
    """The user's artifact folder: $XDG_CACHE_HOME (or ~/.cache)/compile-and-serve/artifacts."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "compile-and-serve" / "artifacts"


class ArtifactStore:
    """The artifacts in one folder. A folder that cannot be written is only read, and a warning says so once.

    read_only: nothing in the folder is changed: artifacts are neither written nor removed, and their use is not recorded.
    """

    def __init__(self, root: Path, *, read_only: bool = False) -> None:
        self.root = root
        self._read_only = read_only
        self._has_warned = False  # that the folder cannot be written
        self._rejected: set[Path] = set()
        self._unreadable: set[Path] = set()

    def path(self, kind: str, fields: Mapping[str, Any]) -> Path:
        """The folder of the artifact with these fields, whether it exists or not."""
        return self.root / kind / key_of(fields)

    def get(self, kind: str, fields: Mapping[str, Any]) -> Entry | None:
        """The artifact with these fields, once its files are verified; None if there is none. One that cannot be used is logged once."""
        entry = Entry(kind=kind, key=key_of(fields), path=self.path(kind, fields))
        if entry.path in self._rejected | self._unreadable or not os.path.lexists(entry.path / MANIFEST):
            return None
        try:
            entry.verify()
        except ArtifactError as error:
            log.warning("Not using an artifact: %s. It is rebuilt.", error)
            if not self._read_only:
                shutil.rmtree(entry.path, ignore_errors=True)
            if os.path.lexists(entry.path):  # it could not be removed; a removed one may be rebuilt by another process
                self.reject(entry)
            return None
        except OSError as error:
            log.warning("Not using the artifact %s, which cannot be read (%s). It is kept.", entry.path, error)
            self._unreadable.add(entry.path)
            return None
        if not self._read_only:
            with contextlib.suppress(OSError):  # without permission to write, the time of use is not recorded
                os.utime(entry.path / MANIFEST)
        return entry

    def reject(self, entry: Entry) -> None:
        """Do not use an artifact any more. The next `put` replaces it."""
        self._rejected.add(entry.path)

    def put(self, kind: str, fields: Mapping[str, Any], content: Path, *, replaces: bool = False) -> Entry | None:
        """Copy the folder `content` into the store as the artifact with these fields.

        → the artifact; None if the store is read-only, or if it cannot be written, which is logged once.
        replaces: True replaces an existing artifact with the same fields. False keeps it, unless it was rejected.
        """
        target = self.path(kind, fields)
        if self._read_only or target in self._unreadable:
            return None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with WorkFolder(_STAGING, target.parent) as folder:
                staged = Path(folder) / "artifact"
                shutil.copytree(content, staged)
                files = {str(file.relative_to(staged)): _digest(file) for file in _files(staged)}
                manifest = {"schema": SCHEMA, "kind": kind, "fields": dict(fields), "files": files}
                (staged / MANIFEST).write_text(json.dumps(manifest, indent=1))
                _sync(staged)
                if replaces or target in self._rejected:
                    _move_into(Path(folder), target)
                self._publish(staged, target)
        except OSError as error:
            self._warn_unwritable(error)
            return None
        self._rejected.discard(target)
        return Entry(kind=kind, key=target.name, path=target)

    def _warn_unwritable(self, error: OSError) -> None:
        if not self._has_warned:
            log.warning("Artifacts cannot be written to %s (%s), so the next start compiles again.", self.root, error)
        self._has_warned = True

    def _publish(self, staged: Path, target: Path) -> None:
        """Move a finished artifact to its place. An intact one that is already there stays: a process may be reading it."""
        existing = Entry(kind=target.parent.name, key=target.name, path=target)
        for _ in range(2):  # another process may put the same artifact between the check and the rename
            if os.path.lexists(target):
                with contextlib.suppress(ArtifactError):
                    existing.verify()
                    return
                _move_into(staged.parent, target)
            try:
                os.rename(staged, target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise OSError(errno.ENOTEMPTY, "other processes keep writing it", str(target))

    @contextmanager
    def lock(self, fields: Mapping[str, Any]) -> Iterator[None]:
        """Held while an artifact is built: a second process waits and then loads it. Messages say what it waits for."""
        if self._read_only:
            yield
            return
        try:
            folder = self.root / ".locks"
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / f"{key_of(fields)}.lock")
            waits = [FIRST_WAIT_SECONDS]
            while True:
                try:
                    lock.acquire(timeout=waits[-1])
                    break
                except Timeout:
                    log.warning(
                        "Still waiting for another process that compiles the same model and holds %s (%.0f s).", lock.lock_file, sum(waits)
                    )
                    waits.append(NEXT_WAIT_SECONDS)
        except OSError as error:
            self._warn_unwritable(error)
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Entry]:
        """All artifacts, intact or not, by kind and key."""
        folders = [manifest.parent for manifest in sorted(self.root.glob(f"*/*/{MANIFEST}"))]
        return [Entry(kind=f.parent.name, key=f.name, path=f) for f in folders if not f.name.startswith(".")]

    def leftovers(self) -> list[Path]:
        """Folders of interrupted writes."""
        return sorted(folder for folder in self.root.glob(f"*/{_STAGING}*") if not is_in_use(folder))

    def explain_miss(self, kind: str, fields: Mapping[str, Any]) -> str | None:
        """A sentence that says in which fields the most similar artifact of this kind differs; None if there is no other."""
        best: list[str] | None = None
        for entry in self.entries():
            if entry.kind != kind or entry.path in self._rejected:
                continue
            try:
                theirs = entry.manifest["fields"]
            except (OSError, ArtifactError):
                continue
            differing = [name for name in fields if theirs.get(name) != fields[name]]
            if best is None or len(differing) < len(best):
                best = [f"{name} ({_short(theirs.get(name))} there, {_short(fields[name])} here)" for name in differing]
        return None if best is None else f"the nearest {kind} differs in {', '.join(best)}"


def _move_into(folder: Path, target: Path) -> None:
    """Move an artifact into a folder that is removed soon. Unlike deleting it in place, this is atomic."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, Path(tempfile.mkdtemp(dir=folder)) / target.name)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _files(folder: Path) -> list[Path]:
    """All files below a folder. Raises `OSError` if a folder cannot be read."""

    def fail(error: OSError) -> NoReturn:
        raise error

    return sorted(Path(parent, name) for parent, _, names in os.walk(folder, onerror=fail) for name in names)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Write the files to disk, before the rename makes them visible."""
    for file in _files(folder):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
