"""A pass from outside adds an input, which the host fills from what requests bring, and state of its own.

The pass pulls each sequence's embeddings towards their running mean, as far as the request says.

Shape legend: T tokens of the step, S sequences, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.model import ModelSource
from compile_and_serve.compiler.rewrite.graph_pass import BasePass, PassContext, PassResult, is_call
from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent, RecurrentLayer, gather_slot, scatter_slot
from compile_and_serve.custom_ops.step import TOKENS, StepInput, current_metadata
from tests.support.transformers_models import load_reference, write_random_model

PULL = StepInput(name="pull", dtype=torch.int32, dims=(TOKENS,), fill=lambda batch: batch.data_of_token("pull", 0), advance="same")
SUMS = "embedding_sums"
PROMPTS = [[5, 17, 200, 31], [7, 8, 9, 10, 11, 12, 13, 14, 15], [44], [5, 17, 200, 31]]
PULLS = [0, 30, 70, 90]
NUM_TOKENS = 12


def _pull(x_TD: torch.Tensor, pull_T: torch.Tensor, sums: torch.Tensor, columns: torch.Tensor, group: str) -> torch.Tensor:
    """x_t + pull / 100 · (mean of x_0 … x_t - x_t) along each sequence."""
    metadata = current_metadata(group)
    out_TD = x_TD.clone()
    starts = metadata.query_start_loc.tolist()
    sums_SD = gather_slot(sums, columns, metadata.read_pages, 1)[:, 0].masked_fill((metadata.num_computed <= 0)[:, None], 0)
    for s, length in enumerate(metadata.seq_lens.tolist()):
        if not length:
            continue
        before = length - (starts[s + 1] - starts[s])
        sum_D = sums_SD[s]
        for token in range(starts[s], starts[s + 1]):
            sum_D += x_TD[token]
            mean_D = sum_D / (before + token - starts[s] + 1)
            out_TD[token] += pull_T[token] / 100 * (mean_D - x_TD[token]).to(x_TD.dtype)
    scatter_slot(sums_SD[:, None], sums, columns, metadata.write_pages)
    return out_TD


PULL_OP = define(
    "test_pull(Tensor x, Tensor pull, Tensor(a!) sums, Tensor columns, str group) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x, *_: torch.empty_like(x),
    CompositeExplicitAutograd=_pull,
)


class PullEmbeddings(BasePass):
    name = "pull_embeddings"
    after = "eliminate_noops"

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        sums = RecurrentLayer(parts=(StateTensor(shape=(1, int(model.config["hidden_size"]))),))
        return (PULL, StateGroup(name=SUMS, layers=(sums,), kind=Recurrent()))

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        matched = 0
        for node in list(gm.graph.nodes):
            if not is_call(node, F.embedding) or any(is_call(user, PULL_OP) for user in node.users):
                continue
            pull, sums, columns = (ctx.argument(gm, name) for name in ("pull", f"{SUMS}.0", f"{SUMS}.0.columns"))
            users = list(node.users)
            with gm.graph.inserting_after(node):
                pulled = ctx.call(gm, PULL_OP, node, pull, sums, columns, SUMS, origin=node)
            for user in users:
                user.replace_input_with(node, pulled)
            matched += 1
        return PassResult(matched=matched)


class AddsPositions(PullEmbeddings):
    """Its input has the name of one of the model's."""

    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        return (StepInput(name="positions", dtype=torch.int32, dims=(TOKENS,), fill=lambda batch: batch.positions),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


def expected_tokens(folder: Path, prompt: list[int], pull: int) -> list[int]:
    """The greedy tokens of transformers' model whose embeddings are pulled."""
    model = load_reference(folder, torch.float32)

    def hook(module: Any, args: Any, x_BTD: torch.Tensor) -> torch.Tensor:
        counts_T1 = torch.arange(1, x_BTD.shape[1] + 1)[:, None]
        return x_BTD + pull / 100 * (x_BTD.cumsum(1) / counts_T1 - x_BTD)

    model.get_input_embeddings().register_forward_hook(hook)
    sequence = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    return sequence[len(prompt) :]


def make_llm(folder: Path, cache_dir: Path, pass_class: str = "PullEmbeddings") -> LLM:
    return LLM(
        str(folder),
        dtype="float32",
        user_passes=[f"{__name__}:{pass_class}"],
        verify_passes=True,
        cache_dir=cache_dir,
        num_kv_blocks=64,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        skip_tokenizer_init=True,
        device="cpu",
    )


@pytest.mark.slow
def test_requests_fill_an_input_that_a_pass_added(folder: Path, tmp_path: Path) -> None:
    """With prompts in chunks, decodes in a batch, and the artifact's plan, which holds no Python."""
    expected = [expected_tokens(folder, prompt, pull) for prompt, pull in zip(PROMPTS, PULLS, strict=True)]
    assert expected[0] != expected[3]  # equal prompts, other data
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    for artifact in ("made", "hit"):
        with make_llm(folder, tmp_path) as llm:
            report = llm.info.compile_report
            assert (report["artifact"], report["pass_sites.pull_embeddings.matched"]) == (artifact, 1)
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False, step_data=[{"pull": pull} for pull in PULLS]
            )
            assert [output.outputs[0].token_ids for output in outputs] == expected
            (output,) = llm.generate([{"prompt_token_ids": PROMPTS[3]}], greedy, use_tqdm=False)
            assert output.outputs[0].token_ids == expected[0]  # it brings nothing: the default


class ReadsUndeclared(PullEmbeddings):
    def adds(self, model: ModelSource) -> Sequence[StepInput | StateGroup]:
        return ()


@pytest.mark.parametrize(
    ("pass_class", "message"),
    [
        ("AddsPositions", "adds 'positions' to the step, which has another of this name"),
        ("ReadsUndeclared", "A step has no 'pull': a pass that reads it returns its declaration from `adds`"),
    ],
)
def test_wrong_declarations_are_refused(folder: Path, tmp_path: Path, pass_class: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_llm(folder, tmp_path, pass_class)
