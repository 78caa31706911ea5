"""What a ledger says: seconds by stage, tokens, steps, misses, and the sentence that explains most of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from compile_and_serve.runtime.ledger.records import Miss, RequestLedger
from compile_and_serve.serve.ledger.record import RequestRecord, SequenceRecord
from compile_and_serve.serve.ledger.sentences import WAITS, sentence_of

_AVOIDABLE = ("evicted", "snapshot", "not_loaded", "differs")  # misses of tokens that could have been reused

Decode = Callable[[Sequence[int]], str]
Span = dict[str, Any]  # {"name", "start", "seconds"}: start in seconds from the request's begin


def summarize(record: RequestRecord, *, decode: Decode | None, with_prefix: bool = True, bandwidth: float = 0.0) -> dict[str, Any]:
    """The ledger as JSON. It may be asked for while the request runs.

    with_prefix: say what the prefix cache had, and why not more. bandwidth: bytes/s of the device's memory; 0: unknown.
    """
    sequences = [_sequence(one, decode, with_prefix=with_prefix, bandwidth=bandwidth) for one in record.sequences]
    spans = timeline(record)
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span["name"]] = seconds.get(span["name"], 0.0) + span["seconds"]
    if record.sending:
        seconds["sending"] = record.sending
    if detokenize := sum(max(0.0, one.output_seconds) for one in record.sequences if one.ended):
        seconds["detokenize"] = detokenize
    end = record.ended or time.monotonic()
    return {
        "request_id": record.request_id,
        "began": record.wall,
        "total_seconds": _round(end - record.began),
        "seconds": {name: _round(value) for name, value in seconds.items()},
        "why": _why(seconds, _details(record, decode, with_prefix=with_prefix)),
        "timeline": spans,
        "sequences": sequences,
    }


def timeline(record: RequestRecord) -> list[Span]:
    """The stages of a request in their order. Of several sequences: of those that the request waited for."""
    spans = [_span(name, begin - record.began, end - begin) for name, begin, end in record.stages]
    return spans + [span for one in _awaited(record) for span in _spans_of(one, record)]


def _awaited(record: RequestRecord) -> list[SequenceRecord]:
    """Of sequences side by side, the one whose first token came last. Before it, those that had ended when it began."""
    left, chain = list(record.sequences), list[SequenceRecord]()
    while left:
        one = max(left, key=lambda sequence: (not sequence.first_token, sequence.first_token))
        chain.append(one)
        left = [before for before in left if before.ended and before.ended <= one.submitted]
    return chain[::-1]


def _spans_of(one: SequenceRecord, record: RequestRecord) -> list[Span]:
    start, end = one.submitted - record.began, (one.ended or record.ended or time.monotonic()) - record.began
    engine, spans = one.before_first, list[Span]()
    if engine is None:
        return [_span("waiting", start, end - start)]
    for name, seconds in (("transport", engine.transport), *engine.preparing.items(), *engine.queue.items()):
        if seconds > 0:
            spans.append(_span(name, start, seconds))
            start += seconds
    first = one.first_token - record.began
    if engine.encode:
        encode = max(0.0, min(engine.encode, first - start))
        spans.append(_span("encode", start, encode))
        start += encode
    # The engine's own time from first scheduled to first token holds the waits after a preemption, which are in the queue's.
    spans.append(_span("prefill", start, max(0.0, first - start)))
    for name, begin, pause_end in one.pauses:
        if begin - record.began > first:
            spans.append(_span("decode", first, begin - record.began - first))
        spans.append(_span(name, begin - record.began, pause_end - begin))
        first = pause_end - record.began
    return [*spans, _span("decode", first, max(0.0, end - first))]


def _sequence(one: SequenceRecord, decode: Decode | None, *, with_prefix: bool, bandwidth: float) -> dict[str, Any]:
    engine, prefill = one.engine or RequestLedger(), one.before_first or RequestLedger()
    tokens: dict[str, Any] = {"prompt": one.prompt_tokens, "generated": one.new_tokens}
    if with_prefix:
        loaded = sum(engine.loaded_tokens.values())
        tokens["computed"] = engine.computed_tokens
        tokens["cached"] = {"device": max(0, engine.cached_tokens - loaded), **engine.loaded_tokens}
    answer: dict[str, Any] = {
        "engine_id": one.engine_id,
        "finish_reason": one.finish_reason,
        "tokens": tokens,
        "prefill": {
            "seconds": _round(prefill.prefill),
            "chunks": prefill.chunks,
            "steps": prefill.prefill_steps,
            "beside_tokens": prefill.beside_tokens,
        },
        "queue": {name: _round(seconds) for name, seconds in engine.queue.items()},
        "preparing": {name: _round(seconds) for name, seconds in engine.preparing.items()},
    }
    if one.error is not None:
        answer["error"] = one.error
    if engine.preemptions:
        answer["preemptions"] = {
            "count": engine.preemptions,
            "seconds": _round(engine.preempted),
            "recomputed_seconds": _round(engine.recomputed),
            "recomputed_tokens": engine.recomputed_tokens,
        }
    if engine.encoded_items:
        answer["media"] = {"items": engine.encoded_items, "encode_seconds": _round(engine.encode)}
    if one.draft_tokens:
        answer["drafts"] = {"tokens": one.draft_tokens, "accepted": one.accepted_tokens}
    totals = one.decode_steps
    seconds = sum(totals.seconds.values())
    if totals.steps:
        decode_seconds = (one.ended or time.monotonic()) - one.first_token
        answer["steps"] = {kind: {"count": count, "seconds": _round(totals.seconds.get(kind, 0.0))} for kind, count in totals.steps.items()}
        answer["with_prompts"] = {"count": totals.prompt_steps, "seconds": _round(totals.prompt_seconds)}
        answer["between_steps"] = _round(max(0.0, decode_seconds - seconds))
        answer["padding"] = {"tokens": totals.tokens, "padded": totals.padded_tokens}
        answer["bytes_read"] = int(totals.row_bytes)
        if bandwidth and seconds:
            answer["bandwidth_share"] = round(totals.bytes / seconds / bandwidth, 3)
    of_steps = [_miss(name, count) for name, count in totals.misses.items()]
    misses = [miss for miss in (*engine.misses, *of_steps) if with_prefix or miss.kind != "prefix"]
    answer["misses"] = [{"kind": one.kind, "reason": one.reason, "sentence": sentence_of(one, decode)} for one in misses]
    return answer


def _why(seconds: dict[str, float], details: dict[str, str]) -> str:
    """The stages that took the most, as a sentence."""
    named = sorted(((value, name) for name, value in seconds.items() if name in WAITS and "." not in name), reverse=True)
    total = sum(value for value, _ in named)
    parts = [f"{_duration(value)}: {WAITS[name]}{details.get(name, '')}" for value, name in named[:3] if value >= 0.1 * total]
    return "; ".join(parts) + "." if parts else ""


def _details(record: RequestRecord, decode: Decode | None, *, with_prefix: bool) -> dict[str, str]:
    """What made a stage long, by its name."""
    chain, details = _awaited(record), dict[str, str]()
    if not chain or (engine := chain[-1].before_first) is None:
        return details
    one = chain[-1]
    if engine.prefill_steps and with_prefix:
        steps = "1 step" if engine.prefill_steps == 1 else f"{engine.prefill_steps} steps"
        beside = f", which also computed {engine.beside_tokens} tokens of others" if engine.beside_tokens > engine.computed_tokens else ""
        missed = "".join(f" — {sentence_of(miss, decode)[:-1]}" for miss in engine.misses if miss.reason in _AVOIDABLE)
        details["prefill"] = f" ({engine.computed_tokens} of its {one.prompt_tokens} tokens, in {steps}{beside}{missed})"
    totals = one.decode_steps
    lasted = (one.ended or time.monotonic()) - one.first_token
    if totals.prompt_seconds > 0.2 * lasted:
        took = _duration(totals.prompt_seconds)
        details["decode"] = f" ({took} of it in {totals.prompt_steps} steps that also computed prompts of others)"
    return details


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _span(name: str, start: float, seconds: float) -> Span:
    return {"name": name, "start": _round(start), "seconds": _round(seconds)}


def _round(seconds: float) -> float:
    return round(seconds, 6)


def _miss(name: str, count: int) -> Miss:
    kind, reason = name.split(".")
    return Miss(kind, reason, count)
