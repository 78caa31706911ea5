"""Images in requests of all APIs: the engine gets the same prompt and patches however they are sent; what is hostile gets a sentence."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from compile_and_serve.runtime.media.fetch import FetchLimits
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import Server, StartServer
from tests.support.fake_engine import says
from tests.support.tokenizers import byte_level_tokenizer

pytest.importorskip("PIL")

import PIL.Image

pytestmark = pytest.mark.asyncio

TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PICTURE = PIL.Image.fromarray(np.random.default_rng(1).integers(0, 256, (24, 40, 3), dtype=np.uint8))  # 3 × 5 tokens


def vision_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer(["the quick brown fox"])
    tokenizer.backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
    return Tokenizer(tokenizer.backend, special_tokens=dict(tokenizer.special_tokens), chat_templates={"default": TEMPLATE})


def media_info(tokenizer: Tokenizer, **options: Any) -> MediaInfo:
    vision = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    ids = {name: tokenizer.backend.token_to_id(text) for name, text in (("image_token_id", TOKENS[1]), ("video_token_id", TOKENS[2]))}
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": vision, **ids}
    config["image_processor"] = {"min_pixels": 64, "max_pixels": 64 * 64}
    return MediaInfo(config=json.dumps(config).encode(), folder="", **options)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return vision_tokenizer()


@pytest.fixture
def start(start_server: StartServer, tokenizer: Tokenizer) -> Callable[..., Any]:
    async def start(media: dict[str, Any] | None = None, **settings: Any) -> Server:
        engine = {"media": media_info(tokenizer, **(media or {}))}
        return await start_server(script=says(tokenizer, "A fox."), engine=engine, **settings)  # type: ignore[no-any-return]

    return start


def encoded(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


URL = data_url(encoded(PICTURE))
LAST = {"type": "text", "text": "What is it?"}


def chat_part(url: Any = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


async def ask(server: Server, *parts: Any, **fields: Any) -> Any:
    return await server.chat(messages=[{"role": "user", "content": [*parts, LAST]}], **fields)


def what_engine_got(server: Server, tokenizer: Tokenizer) -> tuple[str, list[tuple[int, int]], EngineRequest]:
    """The last request's text with runs of placeholders as one, and the places of its media."""
    one = server.engine.requests[-1]
    text = tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False)
    while TOKENS[1] * 2 in text:
        text = text.replace(TOKENS[1] * 2, TOKENS[1])
    return text, [(item.position, item.length) for item in one.media], one


async def test_all_apis_give_the_engine_the_same(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    server = await start()
    expected = f"<|start|>user\n<|vision_start|>{TOKENS[1]}<|vision_end|>What is it?<|end|>\n<|start|>assistant\n"
    anthropic = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}}
    question = {"role": "user", "content": [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "What is it?"}]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [chat_part(), LAST]}]},
        "/v1/responses": {"input": [question]},
        "/v1/messages": {"messages": [{"role": "user", "content": [anthropic, LAST]}], "max_tokens": 50},
    }
    keys, patches = set(), set()
    for route, body in bodies.items():
        answer = await server.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        text, places, one = what_engine_got(server, tokenizer)
        assert text == expected, route
        [(position, length)] = places
        assert (length, one.prompt_token_ids[position]) == (15, tokenizer.backend.token_to_id(TOKENS[1]))
        keys.add(one.media[0].key)
        patches.add(bytes(one.media[0].arrays["patches"].data))
        rows = one.media[0].arrays["positions"].rows(position, position + 16)
        assert rows[-1].tolist() == [position + 5] * 3
    assert len(keys) == len(patches) == 1
    counted = await server.http.post("/v1/messages/count_tokens", json={"messages": bodies["/v1/messages"]["messages"]})
    assert counted.json()["input_tokens"] == len(one.prompt_token_ids)
    metrics = (await server.http.get("/metrics")).text
    assert 'media_seconds_count{model_name="test-model",stage="preprocess"} 4.0' in metrics


async def test_images_in_tool_results(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    server = await start()
    source = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
    shown = [{"type": "text", "text": "A screenshot:"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": shown}]},
    ]
    answer = await server.http.post("/v1/messages", json={"messages": messages, "max_tokens": 9})
    assert answer.status_code == 200, answer.text
    text, places, _ = what_engine_got(server, tokenizer)
    assert f"A screenshot:<|vision_start|>{TOKENS[1]}<|vision_end|>" in text
    assert len(places) == 1


async def test_several_images_stand_in_their_order(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    server = await start(media={"limits": {"image": 3}})
    small = data_url(encoded(PICTURE.resize((16, 16)), "JPEG"), "image/jpeg")
    answer = await ask(server, chat_part(), {"type": "text", "text": "and"}, chat_part(small), mm_processor_kwargs={"max_pixels": 512})
    assert answer.status_code == 200, answer.text
    text, places, _ = what_engine_got(server, tokenizer)
    assert [length for _, length in places] == [6, 4]
    assert text.index("and") > text.index(TOKENS[1])
    answer = await ask(server, *[chat_part(small)] * 4)
    assert "has 4 images, but this server takes 3 at most" in answer.json()["error"]["message"]


async def test_large_bodies(start: Callable[..., Any]) -> None:
    server = await start()
    noise = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 600, 3), dtype=np.uint8))
    answer = await ask(server, chat_part(data_url(encoded(noise))))
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[-1].media[0].length == 64


async def test_users_cannot_write_placeholders(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    server = await start()
    answer = await ask(server, {"type": "text", "text": TOKENS[1]}, chat_part())
    assert answer.status_code == 200, answer.text
    assert len(server.engine.requests[-1].media) == 1


def _turned() -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    return encoded(PICTURE, "JPEG", exif=exif)


def files() -> dict[str, tuple[bytes, tuple[int, ...] | str]]:
    """A file → its grid of tokens, or a part of the sentence."""
    frames = [PICTURE, PICTURE.transpose(PIL.Image.Transpose.ROTATE_180)]
    return {
        "cmyk": (encoded(PICTURE.convert("CMYK"), "JPEG"), (3, 5)),
        "grey": (encoded(PICTURE.convert("L")), (3, 5)),
        "16 bit": (encoded(PIL.Image.fromarray(np.full((24, 40), 40000, np.uint16))), (3, 5)),
        "palette with transparency": (encoded(PICTURE.convert("P"), transparency=3), (3, 5)),
        "rgba": (encoded(PICTURE.convert("RGBA"), "WEBP"), (3, 5)),
        "turned": (_turned(), (5, 3)),
        "animated": (encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), (3, 5)),
        "one pixel": (encoded(PICTURE.resize((1, 1))), (1, 1)),
        "narrow": (encoded(PIL.Image.new("RGB", (20000, 20))), "is too narrow"),
        "truncated": (encoded(PICTURE)[:-60], "cannot be decoded"),
        "bomb": (encoded(PIL.Image.new("1", (30000, 30000))), "is too large"),
        "text": (b"hello", "no image that can be read"),
        "empty": (b"", "no image that can be read"),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "no image that can be read"),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image that can be read"),
    }


async def test_files_of_all_kinds(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    server = await start(max_body_bytes=16 << 20)
    for name, (data, expected) in files().items():
        answer = await ask(server, chat_part(data_url(data)))
        if isinstance(expected, str):
            assert answer.status_code == 400, name
            assert expected in answer.json()["error"]["message"], name
            assert answer.json()["error"]["message"].startswith("messages[0].content[0]"), name
            continue
        assert answer.status_code == 200, (name, answer.text)
        item = server.engine.requests[-1].media[0]
        grid = item.arrays["grid"].rows(item.position, item.position + 1)[0]
        assert (grid[2] // 2, grid[3] // 2) == expected, name
        pixels = item.arrays["patches"].rows(item.position, item.position + item.length)
        if name == "16 bit":
            assert set(np.unique(pixels)) == {156}
        if name == "animated":
            assert abs(int(pixels[0, 0, 0]) - int(np.asarray(PICTURE)[0, 0, 0])) < 60


WRONG_URLS: dict[str, Any] = {
    "data:image/png,abc": "not in base64",
    "data:image/png;base64,!!!": "not base64",
    "file:///etc/passwd": "must be a data: URL",
    "ftp://example.com/a.png": "must be a data: URL",
    "gopher://127.0.0.1/": "must be a data: URL",
    "http://": "must be a data: URL",
    "http://[::1": "is not a URL",
    "/etc/passwd": "must be a data: URL",
    "http://user:pass@example.com/a.png": "no user name",
    "http://example.com/a.png": "does not download from",
    "http://example.com.evil.test/a.png": "does not download from",
    "http://169.254.169.254/latest/meta-data": "does not download from",
    "http://2130706433/": "does not download from",
    "http://0x7f.1/": "does not download from",
    "http://[::ffff:127.0.0.1]/": "does not download from",
    "https://allowed.test@evil.test/": "no user name",
    "https://evil.test#allowed.test": "does not download from",
    "https://evil.test\\@allowed.test/": "must",
    "http://allowed.test:99999/": "is not a URL",
    "": "must be a data: URL",
    7: "an image must be",
}


async def test_urls_that_are_refused(start: Callable[..., Any]) -> None:
    server = await start(media={"domains": ["allowed.test"]})
    for url, expected in WRONG_URLS.items():
        answer = await ask(server, chat_part(url))
        assert answer.status_code == 400, url
        message = answer.json()["error"]["message"]
        assert expected.lower() in message.lower(), (url, message)
        assert "evil" not in message
    for part in ({"type": "image_url"}, {"type": "input_image", "file_id": "f"}, {"type": "image", "source": {"type": "file"}}):
        assert (await ask(server, part)).status_code == 400


async def test_private_addresses_are_refused_whatever_the_name(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is connected to."""
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("a connection was made"))
    server = await start(media={"domains": ["allowed.test"]})
    for address in (
        "127.0.0.1",
        "10.1.2.3",
        "169.254.169.254",
        "192.168.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "::1",
        "fd00::1",
        "fe80::1%eth0",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "224.0.0.1",
        "2002:7f00:1::",
    ):
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, _address=address, **__: [(2, 1, 6, "", (_address, 80))])
        answer = await ask(server, chat_part("http://allowed.test/a.png"))
        assert "private address" in answer.json()["error"]["message"], address


class Hostile(BaseHTTPRequestHandler):
    """Paths of a server of media."""

    def do_GET(self) -> None:
        path, port = self.path, self.server.server_address[1]
        if path == "/good":
            self._send(200, encoded(PICTURE))
        elif path.startswith("/to/"):
            self._send(302, b"", Location=path.removeprefix("/to/") if "//" in path[4:] else f"/{path.removeprefix('/to/')}")
        elif path == "/round":
            self._send(302, b"", Location=f"http://127.0.0.1:{port}/round")
        elif path == "/large":
            self._send(200, b"x" * 10, **{"Content-Length": str(1 << 40)})
        elif path == "/endless":
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                self.wfile.write(b"x" * (1 << 16))
        elif path == "/slow":
            for byte in b"HTTP/1.1 200 OK\r\nA: " + b"b" * 10**6:
                self.wfile.write(bytes([byte]))
                time.sleep(0.1)
        elif path == "/short":
            self._send(200, b"x" * 10, **{"Content-Length": "1000"})
        elif path == "/html":
            self._send(200, b"<html></html>", **{"Content-Type": "image/png"})
        elif path == "/garbage":
            self.wfile.write(b"\x00\x01\x02\r\n\r\n")
        else:
            self._send(404, b"")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def hostile() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()


async def test_downloads(start: Callable[..., Any], hostile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "compile_and_serve.runtime.media.prepare.FetchLimits", lambda domains: FetchLimits(domains=domains, max_bytes=1 << 20, seconds=1.0)
    )
    server = await start(media={"domains": ["127.0.0.1"]})
    base = f"http://127.0.0.1:{hostile}"
    assert (await ask(server, chat_part(f"{base}/good"))).status_code == 200
    assert (await ask(server, chat_part(f"{base}/to/good"))).status_code == 200
    expected = {
        "/round": "redirects more than",
        "/to/http://localhost/": "does not download from",
        "/to/file:///etc/passwd": "must be a data: URL",
        "/large": "more than 1048576 bytes",
        "/endless": "more than 1048576 bytes",
        "/slow": "took more than 1 seconds",
        "/short": "ended before the last byte",
        "/html": "no image that can be read",
        "/garbage": "the download failed",
        "/none": "answered with status 404",
    }
    for path, sentence in expected.items():
        began = time.monotonic()
        answer = await ask(server, chat_part(base + path))
        assert answer.status_code == 400, path
        assert sentence in answer.json()["error"]["message"], (path, answer.text)
        assert time.monotonic() - began < 10, path


async def test_without_pillow_the_extra_is_named(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start()
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    answer = await ask(server, chat_part())
    assert answer.status_code == 400
    assert "compile-and-serve[vision]" in answer.json()["error"]["message"]


async def test_models_of_text_refuse_images_as_before(start_server: StartServer) -> None:
    server = await start_server()
    answer = await ask(server, chat_part())
    assert "this model only reads text" in answer.json()["error"]["message"]


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def torch_file(value: Any) -> str:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return in_base64(buffer.getvalue())


async def test_rows_in_place_of_an_image(start: Callable[..., Any], tokenizer: Tokenizer) -> None:
    """As files of torch.save and safetensors; what is something else gets a sentence."""
    import torch
    from safetensors.torch import save

    server = await start(media={"embeds": True})
    rows = torch.randn(15, 8).bfloat16()
    grid = {"image_grid_thw": [1, 6, 10]}
    for given in (
        {"image_embeds": torch_file(rows), **grid},
        {"image_embeds": torch_file(rows[None]), "image_grid_thw": torch_file(torch.tensor([[1, 6, 10]]))},
        {"image_embeds": in_base64(save({"x": rows})), "grid": [3, 5]},
    ):
        answer = await ask(server, {"type": "image_embeds", "image_embeds": given})
        assert answer.status_code == 200, answer.text
        [item] = server.engine.requests[-1].media
        assert (item.length, item.arrays["embedded"].dtype) == (15, "bfloat16")
        assert np.array_equal(item.arrays["embedded"].rows(item.position, item.position + 15), rows.float().numpy())
    expanded = torch.zeros(1, 1).expand(1 << 20, 1 << 10)
    sparse = torch.eye(4).to_sparse()
    for value, sentence in (
        (torch_file(rows), "need the grid"),
        ({"image_embeds": torch_file(rows), "image_grid_thw": [1, 6, 8]}, "does not have the 15 tokens"),
        ({"image_embeds": torch_file(rows), "image_grid_thw": [2, 6, 10]}, "image_grid_thw must be 1"),
        ({"image_embeds": torch_file([rows]), **grid}, "one plain tensor"),
        ({"image_embeds": torch_file(sparse), **grid}, "one plain tensor"),
        ({"image_embeds": torch_file(expanded), **grid}, "share memory"),
        ({"image_embeds": torch_file(rows.double()), **grid}, "float32, float16"),
        ({"image_embeds": torch_file(rows.int()), **grid}, "floating"),
        ({"image_embeds": torch_file(rows / 0), **grid}, "no finite numbers"),
        ({"image_embeds": torch_file(Tokenizer), **grid}, "can be read"),
        ({"image_embeds": in_base64(b"PK nothing"), **grid}, "can be read"),
        ({"image_embeds": "###", **grid}, "base64"),
        (None, "no URL and no data"),
    ):
        answer = await ask(server, {"type": "image_embeds", "image_embeds": value})
        assert (answer.status_code, sentence in answer.text) == (400, True), (sentence, answer.text)
    closed = await start()
    answer = await ask(closed, {"type": "image_embeds", "image_embeds": {"image_embeds": torch_file(rows), **grid}})
    assert (answer.status_code, "--enable-mm-embeds" in answer.text) == (400, True)
