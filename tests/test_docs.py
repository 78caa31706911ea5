"""What the documents name exists: files, folders, links, Python names and command-line flags."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

from compile_and_serve.option_fields import options_of
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.serve.cli.vllm.catalogue import catalogue
from compile_and_serve.serve.settings import ServerSettings

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("compiler", "custom_ops", "models", "runtime", "serve")
MADE_BY_THE_READER = {"my_passes.py", "report.json", "config.json", "report.html", "adapter_config.json", "modules.json"} | {
    "N_Pooling/config.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
}
FLAGS_OF_OTHERS = {"--check", "--build-arg", "--gpus", "--rm", "--shm-size"}  # of ruff and docker

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def quoted(document: Path) -> list[str]:
    """The text in backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL))


@each_document
def test_files_exist(document: Path) -> None:
    folders = (
        ROOT,
        ROOT / "compile_and_serve",
        document.parent,
        ROOT / "compile_and_serve/runtime/distributed",
        ROOT / "compile_and_serve/runtime/engine",
        ROOT / "benchmarks/results",
    )
    names = [text for text in quoted(document) if re.fullmatch(r"(?!/)[\w./-]+(\.(py|md|json|jsonl|txt|toml|png)|/)", text)]
    missing = [
        name
        for name in names
        if name not in MADE_BY_THE_READER
        and not re.match(r"\d\d_", name)  # a file of a dump
        and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings], target


@each_document
def test_python_names_exist(document: Path) -> None:
    for text in quoted(document):
        match = re.match(rf"(?:compile_and_serve\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)", text)
        if match is None or text.endswith((".py", ".h", ".cu")):
            continue
        pkgutil.resolve_name(f"compile_and_serve.{match.group(1)}")


@each_document
def test_flags_exist(document: Path) -> None:
    sources = [
        *(ROOT / "compile_and_serve" / "serve" / "cli").rglob("*.py"),
        *(ROOT / "benchmarks").glob("*.py"),
        ROOT / "tests/conftest.py",
    ]
    code = "\n".join(path.read_text() for path in sources)
    known = set(re.findall(r"--[a-z][a-z0-9-]+", code))
    options = (*options_of(ServerSettings).values(), *options_of(EngineConfig).values())
    known |= {spelling for option in options for spelling in (option.flag, *option.flags)}
    known |= {"--no-" + option.flag.removeprefix("--") for option in options if option.default is True}
    # typer makes a flag of each parameter's name
    known |= {"--" + name.replace("_", "-") for name in re.findall(r"^\s+(\w+): ", code, re.MULTILINE)}
    if document.name == "vllm-flags.md":
        known |= catalogue().by_spelling().keys()
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", document.read_text()))
    assert flags - known - FLAGS_OF_OTHERS == set()
