"""`compile-and-serve generate`: answer prompts without a server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from compile_and_serve.serve.cli.flags import ModelArgument
from compile_and_serve.serve.cli.output import StageDisplay


def generate_command(
    model: ModelArgument,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts. By default, one per line of --prompts-file or of standard input.")
    ] = None,
    prompts_file: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without applying the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="A system message for the chat.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of generated tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the answer (repeatable).")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    *,
    engine_options: dict[str, Any],
) -> None:
    """Generate answers to prompts, without a server."""
    texts = _prompts(prompts, prompts_file)
    from compile_and_serve.runtime.llm.llm import LLM
    from compile_and_serve.runtime.sampling_params import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop or [], seed=engine_options["seed"]
    )
    params.verify()
    with StageDisplay() as stages:
        llm = LLM(model, on_stage=stages, **engine_options)
    with llm:
        show_progress = len(texts) > 1 and sys.stderr.isatty()
        chat = not raw and bool(llm.get_tokenizer().chat_templates)
        if chat:
            head = [{"role": "system", "content": system}] if system is not None else []
            conversations = [[*head, {"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params, use_tqdm=show_progress)
        elif system is not None:
            raise ValueError("--system needs a chat template: leave --raw out, or use a model that has one.")
        else:
            outputs = llm.generate(texts, params, use_tqdm=show_progress)
    for text, output in zip(texts, outputs, strict=True):
        completion = output.outputs[0]
        if json_lines:
            row = {
                "prompt": text,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(completion.token_ids),
            }
            typer.echo(json.dumps(row, ensure_ascii=False))
        else:
            if len(texts) > 1:
                typer.echo(f"> {text}")
            typer.echo(completion.text if chat else text + completion.text)


def _prompts(given: list[str] | None, file: Path | None) -> list[str]:
    if given and file is not None:
        raise ValueError("Prompts were given both as arguments and with --prompts-file: use one of them.")
    if given:
        return given
    if file is None:
        if sys.stdin.isatty():
            raise ValueError("There is no prompt: give one as an argument, with --prompts-file or on standard input.")
        text = sys.stdin.read()
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompts-file {file} cannot be read: {error}.") from None
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError("There is no prompt: all lines of the input are empty.")
    return prompts
