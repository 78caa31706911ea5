from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from compile_and_serve.runtime.structured.compiler import GrammarJobs


def test_grammars_are_taken_key_by_key() -> None:
    jobs = GrammarJobs()

    def put(*names: str) -> None:
        for name in names:
            future: Future[Any] = Future()
            jobs.put(name[0], (name, future))

    put(*(f"a{number}" for number in range(64)))
    assert jobs.get()[0] == "a0"
    put("b0", "c0", "b1")
    assert [jobs.get()[0] for _ in range(6)] == ["a1", "b0", "c0", "a2", "b1", "a3"]
