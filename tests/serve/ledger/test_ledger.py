"""The ledger of a request as the server tells it: in the answer, in the log and in /metrics. Planted waits have their times."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from compile_and_serve.runtime.ledger.records import MISSES, Miss, RequestLedger, StepTotals
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.output_processor import CompletionDelta
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
    sequence.before_first = sequence.engine = RequestLedger(prefill=0.5, prefill_steps=1, chunks=1, computed_tokens=8, beside_tokens=2040)
    record = RequestRecord("a", "/", began=9.9, sequences=[sequence], ended=12.0)
    found = summarize(record, decode=None, bandwidth=100e9)
    [one] = found["sequences"]
    assert "generated its tokens (1.2 s of it in 9 steps that also computed prompts of others)" in found["why"]
    assert "computed its prompt (8 of its 8 tokens, in 1 step, which also computed 2040 tokens of others)" in found["why"]
    assert "of its 8" not in summarize(record, decode=None, with_prefix=False)["why"]
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


class At:
    """The engine at a time. See `StepSource`."""

    def __init__(self, now: float) -> None:
        self.now, self.step_totals, self.output_seconds = now, StepTotals(steps={"full": int(now)}, seconds={"full": now}), 0.0


def spans_of(record: RequestRecord) -> list[tuple[str, float, float]]:
    return [(one["name"], one["start"], one["seconds"]) for one in summarize(record, decode=None)["timeline"]]


def token(ledger: RequestLedger | None = None) -> CompletionDelta:
    return CompletionDelta(index=0, text="", token_ids=[1], ledger=ledger)


def test_a_preemption_after_the_first_token_is_no_wait_before_it() -> None:
    sequence = SequenceRecord(8, 10.0)
    sequence.take(token(RequestLedger(queue={"slots": 0.5}, prefill=0.5)), At(11.0))
    sequence.take(token(), At(13.0))
    ledger = RequestLedger(queue={"slots": 0.5, "blocks": 2.0}, prefill=0.5, preemptions=1, preempted=2.0, recomputed=1.0)
    sequence.take(token(ledger), At(17.0))
    sequence.ended = 18.0
    record = RequestRecord("a", "/", began=10.0, sequences=[sequence], ended=18.0)
    assert spans_of(record) == [
        ("slots", 0.0, 0.5),
        ("prefill", 0.5, 0.5),
        ("decode", 1.0, 3.0),
        ("preempted", 4.0, 2.0),
        ("recomputed", 6.0, 1.0),
        ("decode", 7.0, 1.0),
    ]
    assert summarize(record, decode=None)["why"].startswith("4.0 s: generated its tokens; 2.0 s: was preempted")


def test_a_request_that_another_engine_began_waits_for_its_blocks() -> None:
    """That engine's token is there at once; the first of this one comes behind the transfer."""
    sequence = SequenceRecord(8, 10.0)
    sequence.take(token(), At(10.1))
    sequence.take(token(RequestLedger(preparing={"kv_load": 0.75}, prefill=0.25, encode=0.125)), At(11.0))
    sequence.ended = 12.0
    record = RequestRecord("a", "/", began=10.0, sequences=[sequence], ended=12.0)
    assert spans_of(record) == [("kv_load", 0.0, 0.75), ("encode", 0.75, 0.125), ("prefill", 0.875, 0.125), ("decode", 1.0, 1.0)]


def test_pieces_one_after_the_other_are_all_on_the_time_line() -> None:
    """Of those side by side, the last."""
    times = ((10.0, 10.5, 11.0), (10.0, 10.25, 10.75), (11.0, 11.5, 12.0))
    sequences = [SequenceRecord(8, submitted, first_token=first, ended=ended) for submitted, first, ended in times]
    for one in sequences:
        one.before_first = one.engine = RequestLedger()
    record = RequestRecord("a", "/", began=10.0, sequences=sequences, ended=12.0)
    assert spans_of(record) == [("prefill", 0.0, 0.5), ("decode", 0.5, 0.5), ("prefill", 1.0, 0.5), ("decode", 1.5, 0.5)]
