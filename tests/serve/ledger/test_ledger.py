"""The ledger of a request as the server tells it: in the answer, in the log and in /metrics. Planted waits have their times."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from compile_and_serve.runtime.ledger.records import MISSES, Miss, StepTotals
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.serve.ledger.record import RequestRecord, SequenceRecord, current_record, stage
from compile_and_serve.serve.ledger.sentences import WAITS, sentence_of
from compile_and_serve.serve.ledger.summary import summarize
from tests.serve.conftest import StartServer
from tests.support.sse import read_events

DIFFERS = Miss("prefix", "differs", other="cmpl-1", position=1733, mine=[1], theirs=[2])


async def test_the_answer_has_its_ledger_when_asked(start_server: StartServer) -> None:
    server = await start_server(prompt_tokens_details=True)
    server.engine.misses = [DIFFERS]
    assert "ledger" not in (await server.complete()).json()["usage"]
    found = (await server.complete(include_ledger=True, n=2)).json()["usage"]["ledger"]
    assert {"tokenize", "slots", "prefill", "decode"} <= found["seconds"].keys()
    assert len(found["sequences"]) == 2
    one = found["sequences"][0]
    assert one["finish_reason"] == "stop"
    assert one["queue"] == {"slots": 0.01}
    assert one["steps"]["plain"]["count"] >= one["tokens"]["generated"] - 1
    [miss] = one["misses"]
    texts = [server.tokenizer.decode([token], skip_special_tokens=False) for token in (1, 2)]
    assert miss["sentence"] == f"The prompt differs from request cmpl-1 at token 1 734: `{texts[0]}` against `{texts[1]}`."


async def test_a_stream_ends_with_its_ledger(start_server: StartServer) -> None:
    server = await start_server()
    answer = await server.chat(include_ledger=True, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last, done = read_events(answer.text)
    assert done == "[DONE]"
    assert not any("ledger" in chunk["usage"] for chunk in chunks[:-1])
    assert last["usage"]["ledger"]["sequences"][0]["tokens"]["generated"] == last["usage"]["completion_tokens"]


async def test_what_others_sent_is_not_told_unless_the_server_says_so(start_server: StartServer) -> None:
    server = await start_server()
    server.engine.misses = [DIFFERS, Miss("graph", "size")]
    one = (await server.complete(include_ledger=True)).json()["usage"]["ledger"]["sequences"][0]
    assert "cached" not in one["tokens"]
    assert [miss["kind"] for miss in one["misses"]] == ["graph"]


async def test_a_stop_string_ends_the_ledger_too(start_server: StartServer) -> None:
    server = await start_server()
    one = (await server.complete(include_ledger=True, stop=["there"])).json()["usage"]["ledger"]["sequences"][0]
    assert one["finish_reason"] == "stop"
    assert one["prefill"]["chunks"] == 1


async def test_the_log_has_the_ledger_at_debug(start_server: StartServer, caplog: pytest.LogCaptureFixture) -> None:
    server = await start_server()
    with caplog.at_level(logging.DEBUG, logger="compile_and_serve.ledger"):
        await server.complete()
    [line] = [one for one in caplog.records if one.name == "compile_and_serve.ledger"]
    assert line.ledger["seconds"]["decode"] > 0  # type: ignore[attr-defined]


async def test_refused_structured_output_is_counted(start_server: StartServer) -> None:
    server = await start_server()
    assert (await server.chat(structured_outputs={"regex": "("})).status_code == 400
    text = (await server.http.get("/metrics")).text
    assert 'cas:misses_total{kind="structured",model_name="test-model",reason="refused"} 1.0' in text
    labels = {line.split("{")[1].split("}")[0] for line in text.splitlines() if line.startswith("cas:misses_total")}
    assert len(labels) == sum(map(len, MISSES.values()))


@pytest.mark.parametrize("name", ["media", "tokenize", "grammar_check"])
def test_a_planted_stage_has_its_time(name: str) -> None:
    record = RequestRecord("a", "/v1/completions")
    current_record.set(record)
    began = time.monotonic()
    with stage(name):
        time.sleep(0.05)
    taken = time.monotonic() - began
    record.ended = time.monotonic()
    found = summarize(record, decode=None)
    assert found["seconds"][name] == pytest.approx(taken, abs=0.002)
    assert WAITS[name] in found["why"]


async def test_a_client_that_reads_slowly_is_in_the_ledger(start_server: StartServer) -> None:
    server = await start_server()
    context = server.app.state.context
    current_record.set(RequestRecord("a", "/v1/completions"))
    prompt, prepared = context.inputs.prepare("Hi", SamplingParams(max_tokens=3))
    generation = await context.engine.submit("a", [prompt], [prepared])
    async for _ in generation:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        taken = time.monotonic() - began
        break
    async for _ in generation:
        pass
    record = current_record.get()
    assert record is not None
    assert 0.0 < record.sending - taken < 0.02
    generation.close()


def test_steps_that_others_prompts_lengthened() -> None:
    sequence = SequenceRecord(8, 10.0, first_token=10.5, ended=12.0, new_tokens=30, finish_reason="length")
    sequence.at_end = StepTotals(
        steps={"full": 20, "plain": 9}, seconds={"full": 0.2, "plain": 1.2}, prompt_steps=9, prompt_seconds=1.2, tokens=400,
        padded_tokens=60, bytes=29e9, row_bytes=5e9, misses={"graph.size": 9},
    )  # fmt: skip
    record = RequestRecord("a", "/", began=9.9, sequences={0: sequence}, ended=12.0)
    [one] = summarize(record, decode=None, bandwidth=100e9)["sequences"]
    assert one["with_prompts"] == {"count": 9, "seconds": 1.2}
    assert one["between_steps"] == pytest.approx(0.1)
    assert one["bytes_read"] == 5_000_000_000
    assert one["bandwidth_share"] == pytest.approx(29 / 1.4 / 100, abs=0.001)
    assert one["misses"][0]["sentence"].startswith("9 steps ran without a CUDA graph")


@pytest.mark.parametrize(("kind", "reason"), [(kind, reason) for kind, reasons in MISSES.items() for reason in reasons])
def test_every_miss_has_a_sentence(kind: str, reason: str) -> None:
    said = {sentence_of(Miss(kind, one), None) for one in MISSES[kind]}
    assert len(said) == len(MISSES[kind])
    assert sentence_of(Miss(kind, reason), None).endswith(".")
