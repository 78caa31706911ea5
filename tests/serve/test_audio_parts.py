"""Audio in requests of all APIs: the engine gets the same prompt and features however it is sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import Server, StartServer
from tests.serve.test_transcriptions import wav
from tests.support.fake_engine import says
from tests.support.tokenizers import byte_level_tokenizer

pytest.importorskip("av")
pytestmark = pytest.mark.asyncio

TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
DATA = base64.b64encode(wav(1.0, rate=8_000)).decode()
LAST = {"type": "text", "text": "What is it?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, MediaInfo]:
    folder: Path = tmp_path_factory.mktemp("qwen2_audio")
    plain = byte_level_tokenizer(["the quick brown fox"])
    plain.backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
    config = {"architectures": ["Qwen2AudioForConditionalGeneration"], "model_type": "qwen2_audio"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2AudioProcessor"}))
    transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=2).save_pretrained(folder)
    named = {"audio_token": TOKENS[0], "audio_bos_token": TOKENS[1], "audio_eos_token": TOKENS[2]}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain.backend, extra_special_tokens=named).save_pretrained(folder)
    tokenizer = Tokenizer(plain.backend, special_tokens=dict(plain.special_tokens), chat_templates={"default": TEMPLATE})
    return tokenizer, MediaInfo(config=json.dumps(config).encode(), folder=str(folder), by_transformers=True, limits={"audio": 2})


@pytest.fixture
def start(start_server: StartServer, model: tuple[Tokenizer, MediaInfo]) -> Callable[..., Any]:
    async def start() -> Server:
        tokenizer, info = model
        return await start_server(  # type: ignore[no-any-return]
            script=says(tokenizer, "A fox."), engine={"media": info}, with_tokenizer=tokenizer, max_body_bytes=1 << 20
        )

    return start


def part(data: str = DATA) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


async def test_all_apis_give_the_engine_the_same(start: Callable[..., Any], model: tuple[Tokenizer, MediaInfo]) -> None:
    server = await start()
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}}
    asked = {"role": "user", "content": [part(), {"type": "input_text", "text": "What is it?"}]}
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part(), LAST]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [url, LAST]}]}),
        ("/v1/responses", {"input": [asked]}),
    )
    found = []
    for route, body in bodies:
        answer = await server.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        one = server.engine.requests[-1]
        [item] = one.media
        assert item.length == 25
        text = model[0].decode(one.prompt_token_ids, skip_special_tokens=False).replace(TOKENS[0] * 25, "♪")
        assert text == "<|start|>user\n<|audio_bos|>♪<|audio_eos|>What is it?<|end|>\n<|start|>assistant\n"
        found.append((one.prompt_token_ids, item))
    assert all(one == found[0] for one in found)
    assert 'media_seconds_count{model_name="test-model",stage="preprocess"} 3.0' in (await server.http.get("/metrics")).text


@pytest.mark.parametrize(
    "parts, sentence",
    [
        ([part("AAAA")], "cannot be decoded"),
        ([part("!!")], "not base64"),
        ([part(base64.b64encode(wav(2.5)).decode())], "longer than 2 seconds"),
        ([part()] * 3, "takes 2 at most"),
        ([{"type": "input_audio", "input_audio": {"format": "wav"}}], "must have data"),
        ([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}], "must be a data: URL"),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], "image_url"),
    ],
)
async def test_wrong_parts(start: Callable[..., Any], parts: list[Any], sentence: str) -> None:
    server = await start()
    answer = await server.chat(messages=[{"role": "user", "content": [*parts, LAST]}])
    assert answer.status_code == 400, answer.text
    assert sentence in answer.json()["error"]["message"]


async def test_models_of_text_read_no_audio(server: Server) -> None:
    answer = await server.chat(messages=[{"role": "user", "content": [part()]}])
    assert answer.status_code == 400
    assert "only reads text" in answer.json()["error"]["message"]
