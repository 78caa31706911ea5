"""`--config FILE`: values from YAML, flags win, mistakes are one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from compile_and_serve.serve.cli.config_file import apply_config_file

app = typer.Typer()
seen: dict[str, Any] = {}


@app.command()
def show(
    model: Annotated[str, typer.Argument()],
    config: Annotated[Path | None, typer.Option(callback=apply_config_file, is_eager=True)] = None,
    port: int = 8000,
    api_key: list[str] | None = None,
    prefix_caching: bool = True,
    ratio: float = 0.5,
    seed_name: str | None = None,
    quantize: Annotated[str | None, typer.Option("--quantize", "-q")] = None,
) -> None:
    seen.update(model=model, port=port, api_key=api_key, prefix_caching=prefix_caching, ratio=ratio, seed_name=seed_name, quantize=quantize)


def run(tmp_path: Path, text: str, *arguments: str) -> tuple[int, str]:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    seen.clear()
    result = CliRunner().invoke(app, ["--config", str(file), *arguments])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_values_come_from_the_file_and_flags_win(tmp_path: Path) -> None:
    text = "model: folder\nport: 9001\napi-key: [one, 2]\nprefix_caching: false\nratio: 0.25\nq: fp8\n"
    assert run(tmp_path, text)[0] == 0
    assert seen == {
        "model": "folder",
        "port": 9001,
        "api_key": ["one", "2"],
        "prefix_caching": False,
        "ratio": 0.25,
        "seed_name": None,
        "quantize": "fp8",
    }
    assert run(tmp_path, text, "other", "--port", "7", "--prefix-caching", "--api-key", "three")[0] == 0
    assert (seen["model"], seen["port"], seen["prefix_caching"], seen["api_key"]) == ("other", 7, True, ["three"])
    assert seen["ratio"] == 0.25


def test_text_is_taken_as_it_is_written(tmp_path: Path) -> None:
    assert run(tmp_path, "model: 1e5\napi-key: [0123, 1.10]\nseed_name: 007")[0] == 0
    assert (seen["model"], seen["api_key"], seen["seed_name"]) == ("1e5", ["0123", "1.10"], "007")


def test_an_empty_value_leaves_the_flag_unset(tmp_path: Path) -> None:
    assert run(tmp_path, "model: x\napi-key:\nport:")[0] == 0
    assert (seen["api_key"], seen["port"]) == (None, 8000)


def test_one_value_of_a_repeatable_flag(tmp_path: Path) -> None:
    assert run(tmp_path, "api-key: only", "folder")[0] == 0
    assert seen["api_key"] == ["only"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("portt: 1", "has no flag --portt"),
        ("config: other.yaml", "has no flag --config"),
        ("port: web", "Invalid value for '--port'"),
        ("prefix-caching: 1", "prefix-caching must be true or false, got '1'"),
        ("seed-name: yes", "seed-name must be a value"),
        ("api-key: [null]", "api-key must be a list of values"),
        ("port: [1, 2]", "port must be a single value"),
        ("- port", "must map flags to values"),
        ("port: [", "is not valid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_status_2(tmp_path: Path, text: str, message: str) -> None:
    status, output = run(tmp_path, text, "folder")
    assert status == 2
    assert message in output


def test_a_missing_file_is_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--config", str(tmp_path / "none"), "folder"])
    assert result.exit_code == 2
    assert "cannot be read" in " ".join(result.output.replace("│", " ").split())


def test_the_model_may_be_missing_from_both(tmp_path: Path) -> None:
    status, output = run(tmp_path, "port: 1")
    assert status == 2
    assert "Missing argument" in output
