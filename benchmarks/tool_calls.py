"""Forced tool calls on the questions of BFCL: how many answers are calls whose arguments match their schema.

    python -m benchmarks.tool_calls --url http://127.0.0.1:8000 --data FOLDER [--sets parallel …] [--sample 40] [--max-tokens 512]

FOLDER has the files BFCL_v4_*.json: `bfcl_eval/data` of the package bfcl-eval (`pip download --no-deps bfcl-eval`, then unzip it).
All its simple and parallel sets are sent, also the "live" ones, which users wrote.
Prints a JSON line for every answer that is wrong or that max_tokens cut off, and one with the counts, in all and by set. "length" counts
the cut off ones.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from benchmarks.common import cpu_name, environment

SETS = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_parallel",
    "live_parallel_multiple",
)
# BFCL's names of types, which come from several languages → JSON's; "" is any type.
_TYPES = {
    "dict": "object", "hashmap": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array",
    "arraylist": "array", "any": "", "": "", "char": "string", "string": "string", "boolean": "boolean", "array": "array",
    "integer": "integer", "object": "object", "number": "number",
}  # fmt: skip


def to_schema(value: Any) -> Any:
    """A schema of BFCL as a JSON schema."""
    if not isinstance(value, Mapping):
        return value
    schema: dict[str, Any] = {}
    for key, part in value.items():
        if key == "type" and isinstance(part, str):
            if kind := _TYPES[part.lower()]:
                schema["type"] = kind
        elif key == "properties":
            schema[key] = {name: to_schema(child) for name, child in part.items()}
        elif key == "items":
            schema[key] = to_schema(part)
        elif key in ("required", "enum", "description", "default", "format", "maximum"):
            schema[key] = part
    if schema.get("type") == "array" and "enum" in schema and not any(isinstance(v, list) for v in schema["enum"]):
        schema["items"] = {**schema.get("items", {}), "enum": schema.pop("enum")}  # BFCL lists the items
    return schema


def read_questions(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every question of the named sets, with messages and OpenAI's tools."""
    for name in names:
        for line in (folder / f"BFCL_v4_{name}.json").read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            tools = [
                {"type": "function", "function": {**function, "parameters": to_schema(function["parameters"])}}
                for function in entry["function"]
            ]
            yield {"id": entry["id"], "messages": entry["question"][0], "tools": tools, "parallel_tool_calls": "parallel" in name}


def problem(answer: Mapping[str, Any], tools: list[dict[str, Any]]) -> str | None:
    """What is wrong with an answer; "length" if max_tokens cut it off; None if all is right."""
    [choice] = answer["choices"]
    if choice["finish_reason"] == "length":
        return "length"
    if choice["finish_reason"] != "tool_calls":
        return f"finish_reason {choice['finish_reason']}"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    for call in choice["message"]["tool_calls"]:
        function = call["function"]
        if function["name"] not in schemas:
            return f"unknown function {function['name']!r}"
        try:
            jsonschema.validate(json.loads(function["arguments"]), schemas[function["name"]])
        except (ValueError, jsonschema.ValidationError) as error:
            return f"arguments: {error!s:.200}"
    return None if choice["message"]["tool_calls"] else "no calls"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--sample", type=int, default=0, help="number of questions; 0: all")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--frequency-penalty", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--tool-choice", default="required")
    parser.add_argument("--body", type=json.loads, default={}, help="more fields of each request, as a JSON object")
    options = parser.parse_args()
    questions = list(read_questions(options.data, options.sets))
    if options.sample:
        questions = random.Random(0).sample(questions, options.sample)

    def ask(question: dict[str, Any]) -> str:
        body = {key: value for key, value in question.items() if key != "id"}
        body |= {"tool_choice": options.tool_choice, "max_tokens": options.max_tokens}
        # A small model repeats itself for ever without a penalty.
        body |= {"temperature": 0, "frequency_penalty": options.frequency_penalty, **options.body}
        response = http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            found: str | None = f"{response.status_code}: {response.json()['error']['message']}"
        else:
            found = problem(response.json(), question["tools"])
        if found is not None:
            print(json.dumps({"id": question["id"], "problem": found}), flush=True)
        return "valid" if found is None else "length" if found == "length" else "wrong"

    started = time.perf_counter()
    with httpx.Client(base_url=options.url, timeout=3600) as http, ThreadPoolExecutor(options.concurrency) as pool:
        model = http.get("/v1/models").json()["data"][0]["id"]
        kinds = list(pool.map(ask, questions))
    seconds = round(time.perf_counter() - started, 1)
    sets: dict[str, Counter[str]] = {}
    for question, kind in zip(questions, kinds, strict=True):
        sets.setdefault(question["id"].rpartition("_")[0], Counter())[kind] += 1
    line = {
        "figure": "bfcl", "model": model, "tool_choice": options.tool_choice, "max_tokens": options.max_tokens,
        "frequency_penalty": options.frequency_penalty, "body": options.body, "questions": len(questions),
        **{kind: kinds.count(kind) for kind in ("valid", "length", "wrong")}, "sets": sets,
        "seconds": seconds, "cpu": cpu_name(), **environment(),
    }  # fmt: skip
    print(json.dumps(line))


if __name__ == "__main__":
    main()
