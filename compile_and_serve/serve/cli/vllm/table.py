"""Writes docs/vllm-flags.md, the table of vLLM's flags: `python -m compile_and_serve.serve.cli.vllm.table`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from compile_and_serve.serve.cli.vllm.catalogue import Catalogue, VllmFlag, catalogue
from compile_and_serve.serve.cli.vllm.decisions import DECISIONS, SAME

DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "vllm-flags.md"
_HEAD = """# vLLM's flags

`compile-and-serve serve` takes the command line of `vllm serve`. This table has every flag of vLLM {version}, read from its source on
{date} by `python -m compile_and_serve.serve.cli.vllm.read_flags WHEEL`, and flags that earlier versions had. It is made by
`python -m compile_and_serve.serve.cli.vllm.table` from [decisions.py](../compile_and_serve/serve/cli/vllm/decisions.py).

| | | flags |
|---|---|---|
| same | the flag is ours too, with vLLM's values | {same} |
| mapped | it becomes flags of ours, or some values have other names | {mapped} |
| ignored | it has no effect here, for the reason given; a warning says so, unless the value is vLLM's default | {ignored} |
| refused | it would change what clients get or what fits into memory: one sentence and status 2; vLLM's default is accepted | {refused} |

The grammar is vLLM's: several values after one flag (`--served-model-name a b`), underscores in names, `--seed=1`, both forms of a
switch (`--no-enable-lora`, `--disable-lora`), JSON as `--hf-overrides.rope_parameters.factor 4` or
`--hf-overrides.architectures+ A,B`, numbers such as `32k` (32,000), `32K` (32,768) and `1m`, `-O3`. The same names work in
`--config FILE`. A word behind several values of a flag is the model where no other word is. Sizes in bytes are ours: `2G` is
2,000,000,000 and `2GiB` 2,147,483,648.
"""


def make_table(flags: Catalogue) -> str:
    """The document."""
    counts = Counter(DECISIONS.get(flag.name, SAME).outcome for flag in flags.flags)
    parts = [
        _HEAD.format(version=flags.version, date=flags.date, **{name: counts[name] for name in ("same", "mapped", "ignored", "refused")})
    ]
    for group in dict.fromkeys(flag.group for flag in flags.flags):
        parts.append(f"\n## {group}\n\n| flag | | |\n|---|---|---|\n")
        parts += [_row(flag) for flag in flags.flags if flag.group == group]
    return "".join(parts)


def _row(flag: VllmFlag) -> str:
    decision = DECISIONS.get(flag.name, SAME)
    names = " ".join(f"`{spelling}`" for spelling in flag.spellings)
    return f"| {names} | {decision.outcome} | {decision.text.replace('|', '/')} |\n"


if __name__ == "__main__":
    DOCUMENT.write_text(make_table(catalogue()), encoding="utf-8")
