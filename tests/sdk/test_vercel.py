"""Vercel's AI SDK with its OpenAI, Anthropic and OpenAI-compatible providers, in node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.sdk.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOURCE = Path(__file__).parent / "ai_sdk"
INSTALLED = Path(__file__).parents[2] / ".venv-sdk" / "ai-sdk"
PROVIDERS = ("chat", "responses", "anthropic", "compatible")


@pytest.fixture(scope="session")
def node_folder() -> Path:
    """A folder with the scenarios and the packages that they import, installed by npm when they are first needed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    INSTALLED.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "scenarios.mjs"):
        shutil.copy(SOURCE / name, INSTALLED)
    done = subprocess.run([npm, "install", "--no-audit", "--no-fund"], cwd=INSTALLED, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the AI SDK: {done.stderr.strip()[-300:]}")
    return INSTALLED


def run(folder: Path, base_url: str, provider: str, scenario: str) -> Any:
    command = ["node", "scenarios.mjs", base_url, MODEL, provider, scenario]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.exhaustive
def test_text(node_folder: Path, base_url: str, provider: str) -> None:
    answer = run(node_folder, base_url, provider, "text")
    assert answer["text"]
    assert answer["finish"] in ("stop", "length")
    assert 0 < answer["usage"]["outputTokens"] <= 20


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.exhaustive_cases(but=["chat"])
def test_stream(node_folder: Path, base_url: str, provider: str) -> None:
    answer = run(node_folder, base_url, provider, "stream")
    assert len(answer["parts"]) > 1
    assert "".join(answer["parts"]) == answer["text"]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.exhaustive_cases(but=["chat"])
def test_objects_match_their_schema(node_folder: Path, base_url: str, provider: str) -> None:
    answer = run(node_folder, base_url, provider, "object")
    assert answer.keys() == {"city", "sunny"}
    assert answer["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.exhaustive_cases(but=["anthropic"])
def test_turns_with_tools(node_folder: Path, base_url: str, provider: str) -> None:
    answer = run(node_folder, base_url, provider, "turns")
    assert len(answer["calls"]) == 2
    for turn in answer["calls"]:
        assert len(turn["results"]) == turn["calls"] == 1
        assert all(result["sunny"] is True for result in turn["results"])
    assert answer["warnings"] == []


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.exhaustive_cases(but=["chat"])
def test_stream_of_tools(node_folder: Path, base_url: str, provider: str) -> None:
    answer = run(node_folder, base_url, provider, "toolStream")
    assert {"tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"} <= set(answer["kinds"])
    assert answer["input"]["city"] in ("Paris", "Rome")
