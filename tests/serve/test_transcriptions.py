"""/v1/audio/transcriptions and /v1/audio/translations over a scripted engine: forms, formats, streams, limits and many clients."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.audio.options import Segment, Transcription, TranscriptionError, TranscriptionOptions
from compile_and_serve.runtime.audio.transcriber import Decode, Decoded
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.transcription.room import AudioRoom
from tests.serve.conftest import ANSWER, Server, StartServer

pytest.importorskip("av")
pytestmark = pytest.mark.asyncio

RATE = 16_000
ROUTE = "/v1/audio/transcriptions"


class OneASecond:
    """A transcriber that asks the engine for one segment for each second of audio."""

    sample_rate = RATE

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.options: list[TranscriptionOptions] = []

    def job(self, samples: np.ndarray, options: TranscriptionOptions) -> OneASecondJob:
        if options.language == "Klingon":
            raise TranscriptionError("The model does not know the language 'Klingon'.")
        self.options.append(options)
        return OneASecondJob(self.tokenizer, samples, options)


class OneASecondJob:
    def __init__(self, tokenizer: Tokenizer, samples: np.ndarray, options: TranscriptionOptions) -> None:
        self.tokenizer, self.samples, self.options = tokenizer, samples, options
        self.result: Transcription | None = None

    async def segments(self, decode: Callable[[Decode], Any]) -> AsyncIterator[Segment]:
        found = Transcription(task=self.options.task, language="en", duration=len(self.samples) / RATE)
        for second in range(len(self.samples) // RATE):
            item = MediaItem(key=bytes([second]), position=0, length=1)
            answer: Decoded = await decode(Decode([2], SamplingParams(max_tokens=100, temperature=0.0), [item]))
            segment = Segment(
                id=second,
                seek=0,
                start=float(second),
                end=second + 0.5,
                text=" " + self.tokenizer.decode(answer.token_ids),
                tokens=answer.token_ids,
                temperature=0.0,
                avg_logprob=-0.1,
                compression_ratio=1.0,
            )
            found.segments.append(segment)
            yield segment
        self.result = found


def wav(seconds: float, *, rate: int = RATE) -> bytes:
    data = bytes(2 * int(seconds * rate))
    head = b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt \x10\0\0\0" + struct.pack("<HHIIHH", 1, 1, rate, 2 * rate, 2, 16)
    return head + b"data" + struct.pack("<I", len(data)) + data


@pytest.fixture
def start(start_server: StartServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    async def start(**settings: Any) -> tuple[Server, OneASecond]:
        transcriber = OneASecond(tokenizer)
        monkeypatch.setattr("compile_and_serve.serve.app.Transcriber.of", lambda *_: transcriber)
        return await start_server(**settings), transcriber

    return start


async def send(server: Server, data: bytes = wav(2.0), *, route: str = ROUTE, **fields: Any) -> httpx.Response:
    return await server.http.post(route, files={"file": ("a.wav", data, "audio/wav")}, data=fields)


async def test_formats(start: Callable[..., Any]) -> None:
    server, transcriber = await start()
    text = f"{ANSWER} {ANSWER}"
    answer = await send(server, model="test-model", language="en", prompt="A prompt", temperature="0.2")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"text": text, "usage": {"type": "duration", "seconds": 2}}
    expected = TranscriptionOptions(language="en", prompt="A prompt", temperature=0.2)
    assert transcriber.options == [expected]
    plain = await send(server, response_format="text")
    assert plain.text == text + "\n"
    assert plain.headers["content-type"].startswith("text/plain")
    srt = (await send(server, response_format="srt")).text
    assert srt == f"1\n00:00:00,000 --> 00:00:00,500\n{ANSWER}\n\n2\n00:00:01,000 --> 00:00:01,500\n{ANSWER}\n\n"
    vtt = (await send(server, response_format="vtt")).text
    assert vtt.startswith(f"WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n{ANSWER}\n\n")
    verbose = (await send(server, response_format="verbose_json")).json()
    assert (verbose["task"], verbose["language"], verbose["duration"], verbose["text"]) == ("transcribe", "english", 2.0, text)
    assert [(one["id"], one["start"], one["end"]) for one in verbose["segments"]] == [(0, 0.0, 0.5), (1, 1.0, 1.5)]
    assert transcriber.options[-1] == TranscriptionOptions(timestamps=True, wants_no_speech=True)
    words = await send(server, response_format="verbose_json", **{"timestamp_granularities[]": ["word", "segment"]})
    assert transcriber.options[-1] == replace(transcriber.options[-2], words=True)
    assert words.json().keys() >= {"words", "segments"}
    english = await send(server, route="/v1/audio/translations")
    assert english.json()["text"] == text
    assert transcriber.options[-1].task == "translate"
    assert 'media_seconds_count{model_name="test-model",stage="decode"} 7.0' in (await server.http.get("/metrics")).text


async def test_the_sdk(start: Callable[..., Any], over_tcp: Callable[[Server], Any]) -> None:
    server, _ = await start()
    text = f"{ANSWER} {ANSWER} {ANSWER}"
    async with openai.AsyncOpenAI(base_url=f"{await over_tcp(server)}/v1", api_key="none", max_retries=0) as client:
        file = ("a.wav", wav(3.0))
        found = await client.audio.transcriptions.create(file=file, model="test-model")
        assert found.text == text
        verbose = await client.audio.transcriptions.create(
            file=file, model="test-model", response_format="verbose_json", timestamp_granularities=["segment"]
        )
        assert [one.start for one in verbose.segments or ()] == [0.0, 1.0, 2.0]
        assert (await client.audio.transcriptions.create(file=file, model="test-model", response_format="srt")).count("-->") == 3
        assert (await client.audio.translations.create(file=file, model="test-model")).text == text
        stream = await client.audio.transcriptions.create(file=file, model="test-model", stream=True)
        events = [one async for one in stream]
        assert "".join(one.delta for one in events[:-1]) == events[-1].text == text
        assert [one.type for one in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
        with pytest.raises(openai.BadRequestError, match="does not know the language"):
            await client.audio.transcriptions.create(file=file, model="test-model", language="Klingon")
        # 16 clients at once, streamed and not.
        several = [client.audio.transcriptions.create(file=("a.wav", wav(1.0 + number % 3)), model="test-model") for number in range(16)]
        for number, one in enumerate(await asyncio.gather(*several)):
            assert one.text == " ".join([ANSWER] * (1 + number % 3))


async def test_streams(start: Callable[..., Any]) -> None:
    server, _ = await start()
    answer = await send(server, stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events == [
        {"type": "transcript.text.delta", "delta": ANSWER},
        {"type": "transcript.text.delta", "delta": " " + ANSWER},
        {"type": "transcript.text.done", "text": f"{ANSWER} {ANSWER}", "usage": {"type": "duration", "seconds": 2}},
    ]
    server.engine.fail_requests = "It broke."
    failed = await send(server, stream="true")
    assert '"error"' in failed.text
    assert "It broke." in failed.text


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "7"}, "temperature"),
        ({"stream": "true", "response_format": "srt"}, "A stream has text alone"),
        ({"timestamp_granularities[]": "word"}, "needs the response_format verbose_json"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "letter"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include is not supported"),
        ({"language": "Klingon"}, "does not know the language"),
        ({"prompt": "x" * 70_000}, "prompt"),
        ({"file": "text"}, "file must be a file"),
    ],
)
async def test_wrong_fields(start: Callable[..., Any], fields: dict[str, Any], sentence: str) -> None:
    server, _ = await start()
    answer = await send(server, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert sentence in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_wrong_files_and_forms(start: Callable[..., Any]) -> None:
    server, _ = await start(max_audio_bytes=1 << 20, max_body_bytes=1 << 16)
    for data, sentence in ((b"", "cannot be decoded"), (b"hello" * 100, "cannot be decoded"), (wav(0.05), "too short")):
        answer = await send(server, data)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "file"
        assert sentence in answer.json()["error"]["message"]
    assert (await send(server, wav(20.0))).status_code == 200  # larger than other bodies may be
    assert (await send(server, wav(40.0))).status_code == 413
    assert (await server.http.post(ROUTE, json={"model": "test-model"})).status_code == 415
    assert (await server.http.post(ROUTE, data={"model": "a"}, files={"other": ("a.wav", wav(1.0))})).status_code == 400
    assert (await server.http.post(ROUTE, content=b"--x", headers={"Content-Type": "multipart/form-data"})).status_code == 400
    assert (await send(server, model="no such model")).status_code == 404
    files = {"file": ("a.wav", wav(1.0))}
    for origin, status in (("http://evil.test", 403), ("http://server", 200)):
        assert (await server.http.post(ROUTE, files=files, headers={"Origin": origin})).status_code == status


async def test_models_that_transcribe_nothing(start_server: StartServer) -> None:
    answer = await send(await start_server())
    assert answer.status_code == 400
    assert "transcribes no audio" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_ends_its_work(start: Callable[..., Any], over_tcp: Callable[[Server], Any]) -> None:
    server, _ = await start()
    server.engine.hold.clear()
    url = await over_tcp(server)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(url + ROUTE, files={"file": ("a.wav", wav(1.0))}, timeout=1.0)
    for _ in range(500):
        if server.engine.aborted:
            break
        await asyncio.sleep(0.01)
    assert len(server.engine.aborted) == 1
    server.engine.hold.set()
    assert (await send(server)).status_code == 200


async def test_keys_and_the_document(start: Callable[..., Any]) -> None:
    server, _ = await start(api_keys=("secret",))
    assert (await send(server)).status_code == 401
    files = {"file": ("a.wav", wav(1.0))}
    assert (await server.http.post(ROUTE, files=files, headers={"Authorization": "Bearer secret"})).status_code == 200
    document = (await server.http.get("/openapi.json", headers={"Authorization": "Bearer secret"})).json()
    form = document["paths"][ROUTE]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert form["required"] == ["file"]
    assert "timestamp_granularities[]" in form["properties"]


async def test_the_ledger_has_every_piece(start: Callable[..., Any]) -> None:
    server, _ = await start()
    assert (await send(server)).status_code == 200
    book = server.app.state.context.engine.book
    [record] = book.ended
    assert [bool(one.ended) for one in record.sequences] == [True, True]
    found = book.summary(record)
    assert found["seconds"]["media"] >= found["seconds"]["media.decode"] > 0
    assert [span["name"] for span in found["timeline"] if span["name"] == "decode"] == ["decode", "decode"]


async def test_room() -> None:
    """First come, first served; a taker that gives up holds nothing."""
    room = AudioRoom(10.0)
    await room.take(8.0)
    order: list[str] = []

    async def take(name: str, seconds: float) -> None:
        await room.take(seconds)
        order.append(name)

    tasks = [asyncio.create_task(take(name, seconds)) for name, seconds in (("a", 6.0), ("b", 1.0), ("c", 3.0))]
    await asyncio.sleep(0)
    assert not order
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    assert order == ["b"]
    room.give_back(8.0)
    await asyncio.gather(*tasks[1:])
    assert order == ["b", "c"]
    await asyncio.wait_for(room.take(6.0), 1.0)
