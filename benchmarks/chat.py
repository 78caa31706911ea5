"""A chat over a long document: what each turn computes, and how long its first token takes. Prints a JSON line for each turn.

    python -m benchmarks.chat MODEL [--document 24000] [--turns 10] [--new-tokens 200] [--device auto]

MODEL may be a folder with a config.json alone: its weights are random then. Each turn's prompt is all that was said, and a question of 40
tokens. `computed_tokens`: of the prompt, those that the prefix cache did not have. `first_token_s`: from the request to its first token.
`answer_s`: of the same prompt again, with an answer of `--new-tokens`. A first conversation over another document is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from compile_and_serve import LLM, SamplingParams

QUESTION_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--document", type=int, default=24000, help="tokens")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    has_weights = any(Path(arguments.model).glob("*.safetensors"))
    length = arguments.document + arguments.turns * (QUESTION_TOKENS + arguments.new_tokens) + 1
    with LLM(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        load_format="auto" if has_weights else "dummy",
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=4,
    ) as llm:
        chat = _Chat(llm, arguments.document, arguments.new_tokens)
        for _ in range(2):
            chat.turn(seed=1)
        chat = _Chat(llm, arguments.document, arguments.new_tokens)
        for turn in range(1, arguments.turns + 1):
            print(
                json.dumps({"benchmark": "chat", "model": arguments.model, "turn": turn, **chat.turn(seed=2), **environment()}), flush=True
            )


class _Chat:
    def __init__(self, llm: LLM, document: int, new_tokens: int) -> None:
        self._llm, self._document, self._new_tokens = llm, document, new_tokens
        self._said: list[int] = []

    def turn(self, seed: int) -> dict[str, Any]:
        """seed: of the document."""
        if not self._said:
            self._said = _tokens(seed, self._document)
        self._said += _tokens(len(self._said), QUESTION_TOKENS)
        first_s, first = self._ask(1)
        rest_s, rest = self._ask(self._new_tokens)  # of the same prompt, which is cached now
        row = {
            "prompt_tokens": len(self._said),
            "computed_tokens": len(self._said) - first.num_cached_tokens,
            "first_token_s": round(first_s, 4),
            "answer_s": round(rest_s, 4),
        }
        self._said += rest.outputs[0].token_ids
        return row

    def _ask(self, max_tokens: int) -> tuple[float, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        [output] = self._llm.generate([{"prompt_token_ids": self._said}], params, use_tqdm=False)
        return time.perf_counter() - began, output


def _tokens(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 300) for _ in range(count)]


if __name__ == "__main__":
    main()
