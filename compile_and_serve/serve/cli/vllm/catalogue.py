"""`VllmFlag`: a flag of vLLM's command line, as `read_flags` has read it from vLLM's source, or one that earlier versions had."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

FLAGS_FILE = Path(__file__).with_name("flags.json")
FORMER = "Earlier versions"

# switch: no value. optional: a value or none. values: one or more. json: JSON, also as --flag.key VALUE. Others: one value.
Kind = Literal["switch", "optional", "text", "int", "float", "values", "json"]

# Flags that vLLM had and 0.33 has not: people's scripts still carry them.
_FORMER: Mapping[Kind, str] = {
    "switch": "--calculate-kv-scales --disable-async-output-proc --disable-frontend-multiprocessing --disable-mm-preprocessor-cache "
    "--enable-prompt-adapter --enable-reasoning --engine-use-ray --guided-decoding-disable-additional-properties "
    "--guided-decoding-disable-any-whitespace --guided-decoding-disable-fallback --multi-step-stream-outputs --use-v2-block-manager "
    "--worker-use-ray",
    "int": "--long-lora-scaling-factors --lora-extra-vocab-size --max-context-len-to-capture --max-long-partial-prefills "
    "--max-num-partial-prefills --max-prompt-adapters --max-seq-len-to-capture --ngram-prompt-lookup-max --ngram-prompt-lookup-min "
    "--num-lookahead-slots --num-scheduler-steps --num-speculative-tokens --tokenizer-pool-size",
    "float": "--rope-theta --scheduler-delay-factor --swap-space",
    "text": "--device --guided-decoding-backend --logits-processor-pattern --preemption-mode --speculative-model --task "
    "--tokenizer-pool-type --qlora-adapter-name-or-path",
    "json": "--override-pooler-config --rope-scaling",
    "values": "--cuda-graph-sizes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmFlag:
    """A flag of vLLM. spellings: the longest name first. off: spellings that switch it off. default: as source text; None: none."""

    spellings: tuple[str, ...]
    kind: Kind
    group: str
    off: tuple[str, ...] = ()
    default: str | None = None

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.spellings[0]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The flags of a version of vLLM, and when they were read."""

    version: str
    date: str
    flags: tuple[VllmFlag, ...]

    def by_spelling(self) -> Mapping[str, VllmFlag]:
        """Every spelling, those that switch a flag off included."""
        return {spelling: flag for flag in self.flags for spelling in (*flag.spellings, *flag.off)}


@cache
def catalogue() -> Catalogue:
    """vLLM's flags, then those of earlier versions."""
    stored = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))
    flags = [
        VllmFlag(spellings=tuple(one["flags"]), kind=one["kind"], group=one["group"], off=tuple(one.get("off", ())), default=one["default"])
        for one in stored["flags"]
    ]
    for kind, names in _FORMER.items():
        flags += [VllmFlag(spellings=(name,), kind=kind, group=FORMER) for name in names.split()]
    return Catalogue(stored["version"], stored["date"], tuple(flags))
