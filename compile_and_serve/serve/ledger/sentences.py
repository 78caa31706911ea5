"""One sentence for each miss, and for what a request waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from compile_and_serve.runtime.ledger.records import Miss

WAITS = {
    "step": "waited for the end of the step that was under way when it came",
    "slots": "waited for a batch slot: as many sequences ran as --max-num-seqs allows",
    "blocks": "waited for memory: too few blocks of the KV cache were free",
    "budget": "waited while the tokens of each step (--max-num-batched-tokens) went to other prompts",
    "prefix": "waited a step for blocks that another request was computing and that it could share",
    "adapter_slots": "waited for a slot of a LoRA adapter: running requests used all of --max-loras",
    "key": "waited because its API key had its share of the engine, or its limit of running requests",
    "group": "waited for batch slots that are given away several at a time while the batch is full",
    "encoder": "waited for a step with room for its images or audio (--max-encoder-tokens)",
    "prompt_logprobs": "waited for a step with room for the log-probabilities of its prompt",
    "grammar": "waited for the grammar of its structured output to be compiled",
    "adapter": "waited for its LoRA adapter to be read",
    "kv_load": "waited for blocks that were loaded from a tier of the KV cache or came from another engine",
    "transport": "was on the way to the engine, which was in the middle of something",
    "media": "waited for its images, videos or audio to be downloaded, decoded and preprocessed",
    "media.room": "waited until the server held less decoded audio",
    "media.download": "downloaded images, videos or audio",
    "media.decode": "decoded images, videos or audio",
    "media.preprocess": "cut images or videos into patches, or audio into pieces",
    "tokenize": "was rendered and tokenized",
    "grammar_check": "waited for the check of its structured output",
    "waiting": "waits in the engine",
    "encode": "ran the encoder on its images or audio",
    "prefill": "computed its prompt",
    "decode": "generated its tokens",
    "sending": "was written, or waited for the client to take what was written",
    "detokenize": "turned its tokens into text",
    "preempted": "was preempted, because others ahead of it needed its blocks of the KV cache, and waited until some were free",
    "recomputed": "computed again what it lost when it was preempted",
}

_GRAPHS = {
    "size": "the step was larger than any that has a CUDA graph",
    "not_captured": "no CUDA graph of that size was captured yet",
    "optional_input": "the step used an optional input (such as an adapter), whose graphs were not captured yet",
    "addresses": "its tensors lay elsewhere than when the graph was captured",
    "unsampled": "structured output needs the graph without sampling, which was not captured yet",
}
_DRAFTS = {
    "batch": "with so many sequences drafts did not pay, or --speculative-config disables them",
    "request": "the requests of the step asked for none (speculate)",
    "structured": "a budget for thinking rules them out",
    "none_found": "nothing in the text so far suggested how it goes on",
}


def sentence_of(miss: Miss, decode: Callable[[Sequence[int]], str] | None) -> str:
    """Why something was not reused or not used. decode: the text of tokens; None: their numbers are shown."""
    if miss.kind == "prefix":
        return _prefix_sentence(miss, decode)
    steps = "1 step" if miss.count == 1 else f"{miss.count} steps"
    if miss.kind == "graph":
        return f"{steps} ran without a CUDA graph: {_GRAPHS.get(miss.reason, miss.reason)}."
    if miss.kind == "draft":
        return f"{steps} had no drafts: {_DRAFTS.get(miss.reason, miss.reason)}."
    return "The form of its structured output was refused."


def _prefix_sentence(miss: Miss, decode: Callable[[Sequence[int]], str] | None) -> str:
    place = f"{miss.position + 1:,}".replace(",", " ")
    if miss.reason == "differs":
        mine, theirs = (_quote(tokens, decode) for tokens in (miss.mine, miss.theirs))
        return f"The prompt differs from request {miss.other} at token {place}: {mine} against {theirs}."
    if miss.reason == "evicted":
        when = f"{miss.seconds:.1f} s before" if miss.seconds else "before"
        return f"Request {miss.other} had the same tokens, but from token {place} on its blocks were evicted {when}: the KV cache was full."
    if miss.reason == "snapshot":
        return f"Request {miss.other} had the same tokens, but of the recurrent state there is no snapshot behind token {place}."
    return {
        "first": "No recent request began like this one.",
        "salt": "No recent request with the same cache_salt and API key began like this one; prefixes are not shared beyond them.",
        "adapter": "A recent request had the same prompt with another LoRA adapter: keys and values depend on it.",
        "short": "The prompt is too short: prefixes are shared in whole blocks, and the last token is always computed.",
        "off": "The prefix cache is off (--no-enable-prefix-caching, or the model has none).",
        "not_loaded": "Blocks that it waited for did not come from the tier or the other engine (see the log), so they were computed.",
        "reads_all": "The request wants something of every prompt token (prompt_logprobs, or a mean), which the cache does not have.",
    }[miss.reason]


def _quote(tokens: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> str:
    if not tokens:
        return "its end"
    return "tokens " + " ".join(map(str, tokens)) if decode is None else f"`{decode(tokens)}`"
