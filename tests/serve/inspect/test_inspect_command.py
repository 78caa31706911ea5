"""`inspect` in the terminal, as an HTML file and as a web server."""

from __future__ import annotations

import re
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.inspect.data import load_dump
from compile_and_serve.serve.inspect.page import build_page, serve_page
from tests.support.dumps import LAYERS, make_dump, repeats
from tests.support.tiny_models import tiny_spec


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")


@pytest.mark.usefixtures("wide")
def test_text_shows_what_the_page_shows(dump: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(dump), "--text"])
    assert result.exit_code == 0, result.output
    assert "(attention → piece 1) × 3" in result.output
    assert f"(rope_attention → piece 1) × {repeats(dump)}" in result.output
    assert "the norm's weight and its input have different dtypes (torch.float32 and torch.bfloat16)" in result.output
    assert re.search(r"fuse_linears .*models/families/llama\.py:\d+", result.output)
    assert len(re.findall(r"\bcorrect\b", result.output)) == len(default_passes())
    assert "Measured pieces (" in result.output
    assert "KV cache 512 tokens, 1.0 MiB, attention by torch" in result.output
    assert re.search(r"largest step\W+2\.00\b", result.output)
    assert "Whole steps, 512 tokens of context" in result.output


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_two_dumps_are_compared(dump: Path, tmp_path: Path) -> None:
    other = make_dump(tmp_path / "other", tiny_spec(layers=LAYERS, dtype=torch.bfloat16), kernels=frozenset({"fused_linear"}))
    result = CliRunner().invoke(app, ["inspect", str(dump), str(other)])
    assert result.exit_code == 0, result.output
    assert re.search(rf"fuse_rope_attention .*{LAYERS} of {LAYERS}.*no fused RoPE kernel", result.output)
    assert re.search(rf"torch.ops.cas.rope_attention.default .* {LAYERS} .*–", result.output)
    assert re.search(r"^\+.*torch.ops.cas.attention.default", result.output, re.MULTILINE)
    same = CliRunner().invoke(app, ["inspect", str(dump), str(dump)])
    assert "The two dumps are equal." in same.output


def test_the_file_needs_no_network(dump: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["inspect", str(dump), "-o", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert not re.search(r"<(?:script|link|img|iframe)[^>]*\b(?:src|href)=[\"'](?!data:)", text)
    assert not re.search(r"@import|\bfetch\(|XMLHttpRequest|url\(http", text)
    assert text.count("Permission is hereby granted") == 1  # dagre
    assert text.count("BSD 3-Clause License") == 1  # diff


def test_data_cannot_end_its_script_element(dump: Path) -> None:
    report = load_dump(dump)
    report["forward"] = "</script><script>alert(1)</script><!--"
    text = build_page(report)
    assert "<script>alert(1)" not in text
    assert "<!--" not in text


def test_served_on_localhost(dump: Path) -> None:
    urls: list[str] = []
    ready = threading.Event()

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    report = load_dump(dump)
    arguments = {"host": "127.0.0.1", "port": 0, "on_ready": on_ready}
    threading.Thread(target=serve_page, args=(report,), kwargs=arguments, daemon=True).start()
    assert ready.wait(30)
    with urllib.request.urlopen(urls[0]) as response:
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.read().decode() == build_page(report)


def test_errors_are_sentences(tmp_path: Path, dump: Path) -> None:
    missing = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert missing.exit_code == 2
    assert "contains no dump of a compilation: write one with --dump-dir" in missing.output
    unwritable = CliRunner().invoke(app, ["inspect", str(dump), "-o", str(tmp_path / "no" / "such" / "folder.html")])
    assert unwritable.exit_code == 2
    assert "cannot be written" in unwritable.output
