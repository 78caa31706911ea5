"""The package of docs/plug-ins.md, installed, has plug-ins of every kind: they are found in every process, and errors are sentences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_and_serve.compiler.rewrite.user_passes import load_pass
from compile_and_serve.plugins import PluginError, load_plugins
from compile_and_serve.runtime.drafting.config import parse_speculative_config
from compile_and_serve.runtime.drafting.method import METHODS
from compile_and_serve.runtime.parsers.registry import ParserError, detect_reasoning_parser, detect_tool_parser, tool_parser
from tests.support.engines import write_tiny_model
from tests.support.server_process import ServerProcess

ROOT = Path(__file__).parents[1]
KINDS = ("models", "platforms", "checkpoint_formats", "drafters", "parsers", "passes")


def install(site: Path, package: str, points: dict[str, dict[str, str]]) -> None:
    """Write the folder that an installer writes for a package: its name and its entry points."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    groups = (f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items()) for group, named in points.items())
    (info / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the document's package installed."""
    folder = tmp_path / "site"
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", (ROOT / "docs" / "plug-ins.md").read_text(), re.DOTALL)
    for name, text in blocks:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    install(folder, project["name"], project["entry-points"])
    return folder


@pytest.fixture
def loaded_anew() -> Iterator[None]:
    """Plug-ins are looked up anew in the test, and after it."""
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()
    METHODS.pop("repeat", None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def broken_site(folder: Path, *kinds: str) -> Path:
    install(folder, "broken-plugins", {f"compile_and_serve.{kind}": {"broken": "no_such_module"} for kind in kinds})
    return folder


def command(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "COLUMNS": "200"}
    whole = [sys.executable, "-m", "compile_and_serve.serve.cli", *arguments]
    return subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.exhaustive
def test_a_server_of_two_ranks_uses_one_plug_in_of_each_kind(site: Path, tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = site.parent / "model"
    model.mkdir()
    for file in tiny_llama_dir.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["AcmeForCausalLM"], "quantization_config": {"quant_method": "acme-plain"}}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--port",
        "0",
        "--tensor-parallel-size",
        "2",
        "--no-cache",
        "--num-gpu-blocks-override",
        "64",
    ]
    options += ["--pass", "count_linears", "--speculative-config", '{"method": "repeat"}', "--tool-call-parser", "acme"]
    server = ServerProcess(str(model), *options)
    try:
        with server.client() as http:
            answer = http.post("/v1/completions", json={"model": str(model), "prompt": "a", "max_tokens": 8, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 8
            drafted = re.findall(r"^\S*spec_decode_num_draft_tokens_total\S* (\S+)$", http.get("/metrics").text, re.MULTILINE)
            assert float(drafted[0]) > 0
        assert "AcmeForCausalLM, float32 on shared cpu" in server.output
    finally:
        server.stop()


@pytest.mark.slow
def test_models_lists_a_plug_ins_family(site: Path) -> None:
    assert "AcmeForCausalLM" in command(site, "models").stdout


@pytest.mark.usefixtures("loaded_anew")
def test_classes_are_found_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert load_pass("count_linears").name == "count_linears"
    assert tool_parser("acme").openers == ("<acme>",)
    assert detect_tool_parser(["<acme> [AVAILABLE_TOOLS][TOOL_CALLS]"]) is tool_parser("acme")
    assert detect_reasoning_parser(["<acme>"]) is None
    config = parse_speculative_config({"method": "repeat"})
    assert config is not None
    assert config.num_speculative_tokens == 2


@pytest.mark.usefixtures("loaded_anew")
@pytest.mark.parametrize("kind", KINDS)
def test_a_plug_in_that_cannot_be_imported_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.syspath_prepend(str(broken_site(tmp_path, kind)))
    sentence = rf"'broken' in compile_and_serve.{kind} of the package broken-plugins \(no_such_module\) cannot be imported: .*No module"
    with pytest.raises(PluginError, match=sentence):
        load_plugins(kind)


@pytest.mark.usefixtures("loaded_anew")
def test_two_packages_with_one_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "other-plugins", {"compile_and_serve.models": {"acme": "other"}})
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(PluginError, match="package other-plugins .* has the name of .* package acme-plugins|acme-plugins .* other-plugins"):
        load_plugins("models")


@pytest.mark.usefixtures("loaded_anew")
def test_a_parser_must_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "wrong", {"compile_and_serve.parsers": {"wrong": "json:JSONDecoder"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ParserError, match="'wrong' in compile_and_serve.parsers is no parser: derive it from"):
        detect_tool_parser([])


@pytest.mark.exhaustive
def test_a_broken_package_fails_a_start_and_not_the_help(tmp_path: Path, tiny_llama_dir: Path) -> None:
    everything = broken_site(tmp_path / "everything", *KINDS)
    assert command(everything, "--help").returncode == command(everything, "serve", "--help").returncode == 0
    site = broken_site(tmp_path / "models", "models")
    for name in ("compile", "serve"):
        failed = command(site, name, str(tiny_llama_dir), "--device", "cpu")
        assert failed.returncode == 2, failed.stderr
        assert "of the package broken-plugins (no_such_module) cannot be imported" in failed.stderr
        assert "Traceback" not in failed.stderr


@pytest.mark.exhaustive
def test_device_takes_the_name_of_a_plug_ins_platform(site: Path) -> None:
    model = write_tiny_model(site.parent / "tiny")
    for device, sentence in (("xpu", "There is no card for xpu: plug one in."), ("brick", "device must be one of auto, cpu, cuda, or a")):
        failed = command(site, "compile", str(model), "--load-format", "dummy", "--device", device)
        assert failed.returncode == 2, failed.stderr
        assert sentence in failed.stderr
        assert "Traceback" not in failed.stderr
