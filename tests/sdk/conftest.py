"""A live server with SmolLM2 for the tests of other people's clients. `make test-sdk` installs the clients and runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server_process import ServerProcess

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    """The address of OpenAI's API."""
    arguments = ("--port", "0", "--device", "cpu", "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    server = ServerProcess(MODEL, *arguments, *parser, "--response-store", "64MiB")
    yield server.url + "/v1"
    assert server.stop() == 0, server.output
