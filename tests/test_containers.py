"""The files in docker/: commands that the command line takes, probes that the server has, and linters' judgement."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from compile_and_serve.serve.cli.api_keys import API_KEY_VARIABLE
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.routers.health import router

FOLDER = Path(__file__).parents[1] / "docker"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
PROBES = {route.path for route in router.routes}  # type: ignore[attr-defined]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def check_command(arguments: list[str]) -> None:
    """The command line takes it. `--help` at its end keeps it from running."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output
    flags = {word for word in arguments if word.startswith("-")}
    assert flags <= set(re.findall(r"--[a-z-]+", result.output)), arguments


def test_every_command_is_one_of_ours() -> None:
    commands = [yaml.safe_load(re.findall(r"^CMD (.*)", file.read_text(), re.MULTILINE)[-1]) for file in DOCKERFILES]
    [compose] = documents("compose.yaml")
    deployment, _ = documents("kubernetes.yaml")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    for command in (*commands, compose["services"]["server"]["command"], server["args"]):
        check_command(command)
        assert command[0] == "serve"


def test_probes_and_keys_are_those_of_the_server() -> None:
    [compose] = documents("compose.yaml")
    deployment, service = documents("kubernetes.yaml")
    server = deployment["spec"]["template"]["spec"]["containers"][0]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"]["path"] in PROBES
    for file in DOCKERFILES:
        assert set(re.findall(r"localhost:8000(/\w+)", file.read_text())) <= PROBES
    # Nobody listens on all addresses without a key.
    assert [one["name"] for one in server["env"]] == [API_KEY_VARIABLE]
    assert ":?" in compose["services"]["server"]["environment"][API_KEY_VARIABLE]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles_pass_the_linter(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_are_small_and_not_of_root() -> None:
    for file in DOCKERFILES:
        lines = [line.split() for line in file.read_text().splitlines()]
        words = [line[0] for line in lines if line]
        assert words.count("RUN") <= 3
        assert words.index("USER") < words.index("ENTRYPOINT")
        assert ["USER", "1000"] in lines
