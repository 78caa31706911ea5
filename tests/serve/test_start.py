"""Errors in the server's configuration are reported at start-up, not to clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.parsers.registry import ParserError
from compile_and_serve.runtime.text.chat_template import ChatTemplateError
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.serve.http.listener import open_unix_socket
from compile_and_serve.serve.server import ServerStartError, _start, complete_settings
from compile_and_serve.serve.settings import ServerSettings
from tests.support.engines import tiny_config, write_tiny_model
from tests.support.tokenizers import byte_level_tokenizer

SETTINGS = ServerSettings(served_model_names=("m",))


class Client:
    """A client of an engine that starts at once."""

    def __init__(self, vocab_size: int) -> None:
        self.info = EngineInfo(max_model_len=64, vocab_size=vocab_size, num_kv_blocks=8, block_size=16, dtype="float32", device="cpu")
        self.is_stopped = False

    async def start(self) -> EngineInfo:
        return self.info

    async def shutdown(self, drain: bool) -> None:
        self.is_stopped = True


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "tiny")
    byte_level_tokenizer([]).backend.save(str(folder / "tokenizer.json"))
    return folder


def test_invalid_chat_template(model_dir: Path, templates: TemplatePool) -> None:
    settings = ServerSettings(served_model_names=("m",), chat_template="{% if %}")
    with pytest.raises(ChatTemplateError, match="The chat template is not valid Jinja"):
        complete_settings(tiny_config(model_dir), settings, templates)


def test_priorities_need_the_priority_policy(model_dir: Path, templates: TemplatePool) -> None:
    assert not complete_settings(tiny_config(model_dir), SETTINGS, templates).priorities
    assert complete_settings(tiny_config(model_dir, scheduling_policy="priority"), SETTINGS, templates).priorities


def test_sampling_defaults_out_of_range(model_dir: Path, templates: TemplatePool) -> None:
    (model_dir / "generation_config.json").write_text('{"temperature": -3.0}')
    with pytest.raises(ServerStartError, match="--override-generation-config cannot be used: temperature must be in"):
        complete_settings(tiny_config(model_dir), SETTINGS, templates)


async def test_end_of_sequence_id_outside_the_vocabulary(model_dir: Path, templates: TemplatePool) -> None:
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [2, 9999]}')
    client = Client(vocab_size=320)
    with pytest.raises(ValueError, match="id 9999 is not an id of the model, whose ids are 0 to 319"):
        await _start(client, tiny_config(model_dir), SETTINGS, templates)  # type: ignore[arg-type]
    assert client.is_stopped


async def test_a_missing_tool_parser_is_reported_before_the_engine_has_started(model_dir: Path, templates: TemplatePool) -> None:
    settings = ServerSettings(served_model_names=("m",), enable_auto_tool_choice=True)
    client = Client(vocab_size=320)
    client.start = asyncio.Event().wait  # type: ignore[assignment]  # never starts
    with pytest.raises(ParserError, match="name it with --tool-call-parser"):
        await _start(client, tiny_config(model_dir), settings, templates)  # type: ignore[arg-type]
    assert client.is_stopped


async def test_a_unix_socket_that_was_replaced_meanwhile(model_dir: Path, templates: TemplatePool, short_dir: Path) -> None:
    path = short_dir / "api.sock"
    settings = ServerSettings(served_model_names=("m",), uds=path)
    client = Client(vocab_size=320)
    with open_unix_socket(path):
        await _start(client, tiny_config(model_dir), settings, templates)  # type: ignore[arg-type]

        async def start() -> EngineInfo:
            open_unix_socket(path).close()
            return client.info

        client.start = start  # type: ignore[method-assign]
        with pytest.raises(ServerStartError, match="was removed or replaced"):
            await _start(client, tiny_config(model_dir), settings, templates)  # type: ignore[arg-type]
    assert client.is_stopped


async def test_a_model_whose_own_template_is_broken_serves_completions(
    model_dir: Path, templates: TemplatePool, caplog: pytest.LogCaptureFixture
) -> None:
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    client = Client(vocab_size=320)
    await _start(client, tiny_config(model_dir), SETTINGS, templates)  # type: ignore[arg-type]
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.message.startswith("Chat requests will be refused unless you set another --chat-template. The chat")
    assert not client.is_stopped
