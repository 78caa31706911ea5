"""Classes that a model's folder brings as Python files (`auto_map` in its JSON files). They run with --trust-remote-code only.

This file imports neither torch nor transformers until a class is loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class FolderCodeError(ValueError):
    """A class of a folder cannot be loaded. The message is one sentence."""


def class_reference(settings: Mapping[str, Any], auto_class: str) -> str | None:
    """What `auto_map` of a JSON file names for one of transformers' Auto classes: "module.Class", or "repository--module.Class".

    Of a tokenizer's pair [slow, fast], the fast one if there is one. None: the file names nothing.
    """
    auto_map = settings.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    named = auto_map.get(auto_class)
    if isinstance(named, list | tuple):
        named = next((one for one in reversed(named) if one is not None), None)
    return named if isinstance(named, str) and named.count(".") == 1 else None


def load_class(folder: Path, reference: str) -> Any:
    """Run the folder's file that `reference` names, with the files that it imports, and return the class.

    The log names the files. Raises `FolderCodeError`.
    """
    from transformers.dynamic_module_utils import HF_MODULES_CACHE, get_class_from_dynamic_module

    files = code_files(folder, reference)
    logger.warning("--trust-remote-code: running code of %s: %s", folder, ", ".join(file.name for file in files))
    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with (cache / ".compile-and-serve.lock").open("w") as lock:  # ranks copy the same files into the cache at the same time
            fcntl.flock(lock, fcntl.LOCK_EX)
            return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    except Exception as error:  # whatever the code raises
        raise FolderCodeError(f"{reference} of {folder} cannot be loaded ({type(error).__name__}: {error}).") from error


def code_files(folder: Path, reference: str) -> list[Path]:
    """The folder's file that `reference` names, and those that it imports. Raises `FolderCodeError` if it has no such file."""
    from transformers.dynamic_module_utils import get_relative_import_files

    if "--" in reference:
        raise FolderCodeError(
            f"{folder} takes {reference.rpartition('--')[2]} from the repository {reference.partition('--')[0]}: copy that repository's "
            "Python files into the folder and remove the prefix from auto_map."
        )
    file = folder / f"{reference.partition('.')[0]}.py"
    if not file.is_file():
        raise FolderCodeError(f"{folder} has no {file.name}, which its auto_map names: check that the download is complete.")
    return [file, *(Path(one) for one in get_relative_import_files(str(file)))]


def code_digest(folder: Path, reference: str) -> str:
    """SHA-256 of the files that `reference` runs."""
    digest = hashlib.sha256()
    for file in sorted(code_files(folder, reference)):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
