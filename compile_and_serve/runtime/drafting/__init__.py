"""Speculative decoding: who drafts tokens, how many, and when it pays. docs/speculation.md describes the whole.

Each method of `speculative_config` is a class in a file of its own. A method from outside is registered with `register_method`.
"""

from compile_and_serve.runtime.drafting.method import DraftMethod, in_package, register_method
from compile_and_serve.runtime.drafting.ngram import NgramDrafter
from compile_and_serve.runtime.drafting.suffix import SuffixDrafter

__all__ = ["DraftMethod", "register_method"]

for _method in (
    DraftMethod(name="ngram", default_tokens=5, host=NgramDrafter.of_config, device=in_package("ngram_drafts", "NgramDrafts")),
    DraftMethod(name="suffix", default_tokens=24, host=SuffixDrafter.of_config),
    DraftMethod(
        name="draft_model", default_tokens=4, device=in_package("draft_model", "DraftModel"), takes_model=True, may_be_pickled=False
    ),
    DraftMethod(name="eagle", default_tokens=3, device=in_package("eagle", "Eagle"), takes_model=True),
    DraftMethod(name="eagle3", default_tokens=3, device=in_package("eagle3", "Eagle3"), takes_model=True),
    DraftMethod(name="mtp", default_tokens=1, device=in_package("mtp", "Mtp")),
    DraftMethod(name="medusa", default_tokens=3, device=in_package("medusa", "Medusa"), takes_model=True),
    DraftMethod(name="dflash", default_tokens=7, device=in_package("dflash", "DFlash"), takes_model=True, max_graph_tokens=15),
):
    register_method(_method)
