"""The server goes on while a checkpoint's hostile chat template runs."""

from __future__ import annotations

import asyncio
import time

from compile_and_serve.runtime.text.template_pool import TemplatePool
from tests.serve.conftest import ANSWER, StartServer
from tests.support.tokenizers import byte_level_tokenizer

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


async def test_other_requests_are_answered_meanwhile(start_server: StartServer) -> None:
    hostile = byte_level_tokenizer([ANSWER], template=LOOP)
    pool = TemplatePool(seconds=1.0)
    try:
        server = await start_server(with_tokenizer=hostile, pool=pool)
        chats = [asyncio.create_task(server.chat()) for _ in range(8)]
        started = time.monotonic()
        for _ in range(10):
            assert (await server.complete()).status_code == 200
            assert (await server.http.get("/ping")).status_code == 200
        assert not any(chat.done() for chat in chats) or time.monotonic() - started > 1
        for response in await asyncio.gather(*chats):
            assert response.status_code == 400
            assert "did not finish these messages within 1 seconds" in response.json()["error"]["message"]
    finally:
        pool.close()
