"""Trains an `Eagle3Head` and measures what its drafts gain.

Shape legend: B sequences, L tokens, N = L - 1 entries, F features of the tapped layers, D hidden size, V vocabulary of the drafts, J steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.support.draft_head.head import Eagle3Head
from tests.support.draft_head.target import Target

STEPS = 4  # of a chain
STEP_WEIGHT = 0.9  # of a step's loss, compared with the step before
WARMUP = 0.03  # share of the time


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """On the device. answers_BL: whether a token is the target's answer. taps_BLF, last_BLD: hidden states; the last ones are normed."""

    tokens_BL: torch.Tensor
    answers_BL: torch.Tensor
    taps_BLF: torch.Tensor
    last_BLD: torch.Tensor

    @staticmethod
    @torch.inference_mode()
    def of(target: Target, tokens_BL: torch.Tensor, answers_BL: torch.Tensor, batch: int = 64) -> Conversations:
        tokens_BL = tokens_BL.to(target.device)
        size = target.hidden_size
        taps = torch.empty(*tokens_BL.shape, 3 * size, dtype=target.dtype, device=target.device)
        last = torch.empty(*tokens_BL.shape, size, dtype=target.dtype, device=target.device)
        for begin in range(0, len(tokens_BL), batch):
            taps[begin : begin + batch], last[begin : begin + batch] = target.states(tokens_BL[begin : begin + batch].long())
        return Conversations(tokens_BL=tokens_BL, answers_BL=answers_BL.to(target.device), taps_BLF=taps, last_BLD=last)

    def batch(self, rows: torch.Tensor) -> Conversations:
        return Conversations(
            tokens_BL=self.tokens_BL[rows], answers_BL=self.answers_BL[rows], taps_BLF=self.taps_BLF[rows], last_BLD=self.last_BLD[rows]
        )


def draft_vocabulary(tokens: torch.Tensor, answers: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [size], in order: the tokens that answers have most often."""
    counts = torch.bincount(tokens[answers].long().flatten(), minlength=size)
    print(f"{size} tokens are {counts.topk(size).values.sum() / counts.sum():.2%} of the answers'", flush=True)
    return counts.topk(size).indices.sort().values


def chained(head: Eagle3Head, target: Target, given: Conversations, steps: int) -> Iterator[torch.Tensor]:
    """Each step's hidden states [B, N, D]."""
    cos, sin = target.rope(torch.arange(given.tokens_BL.shape[1] - 1, device=target.device))
    embeddings = F.embedding(given.tokens_BL[:, 1:].long(), target.embedding_VD)
    return head.forward(embeddings, given.taps_BLF[:, :-1], (cos.to(target.dtype), sin.to(target.dtype)), steps)


def train(
    target: Target, data: Conversations, held_out: Conversations, vocabulary_V: torch.Tensor, *, seconds: float, batch: int, rate: float
) -> Eagle3Head:
    """A head, trained for so many seconds. rate: the highest learning rate."""
    torch.manual_seed(0)
    head = Eagle3Head(target)
    matrices = [one for one in head.parameters() if one.ndim == 2]
    others = [one for one in head.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=target.device.type == "cuda")
    head_VD = target.embedding_VD[vocabulary_V]
    is_drafted = torch.zeros(len(target.embedding_VD), dtype=torch.bool, device=target.device)
    is_drafted[vocabulary_V] = True
    start, shown, shown_fully, count = time.perf_counter(), 0.0, 0.0, 0
    while (share := (time.perf_counter() - start) / seconds) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(share / WARMUP + 0.01, (1.0 - share) / (1.0 - WARMUP), 1.0)
        loss = _loss(head, target, data.batch(torch.randint(len(data.tokens_BL), (batch,), device=target.device)), head_VD, is_drafted)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        count += 1
        passed = time.perf_counter() - start
        if passed > shown + 5.0:
            shown = passed
            print(f"{passed:.0f} s, step {count}: loss {loss.item():.3f}", flush=True)
        if passed > shown_fully + 30.0:
            shown_fully = passed
            measure(head, target, held_out, vocabulary_V)
    return head


def _loss(head: Eagle3Head, target: Target, given: Conversations, head_VD: torch.Tensor, is_drafted: torch.Tensor) -> torch.Tensor:
    """Cross entropy between the target's distribution over the drafts' vocabulary and the head's, in each step of a chain."""
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        with torch.no_grad():
            # Entry i predicts token i + 2, of which the target's hidden state i + 1 tells. Tokens that no draft can be teach nothing.
            counts_BN = F.pad(given.answers_BL[:, 2:] & is_drafted[given.tokens_BL[:, 2:].long()], (0, 1))
            chances_BNV = F.linear(given.last_BLD[:, 1:], head_VD).float().softmax(-1).to(target.dtype)
        total = torch.zeros((), device=target.device)
        for step, hidden_BND in enumerate(chained(head, target, given, STEPS)):
            rows = counts_BN.clone()
            rows[:, :step] = False
            logits_RV = F.linear(hidden_BND[rows], head_VD)
            loss = F.cross_entropy(logits_RV.float(), chances_BNV[rows].float(), reduction="sum")
            total = total + loss / max(len(logits_RV), 1) * STEP_WEIGHT**step
    return total / sum(STEP_WEIGHT**step for step in range(STEPS))


@torch.inference_mode()
def measure(head: Eagle3Head, target: Target, held_out: Conversations, vocabulary_V: torch.Tensor, batch: int = 16) -> dict[int, float]:
    """Number of drafts → tokens a step, of greedy drafts against what the held-out answers say."""
    head_VD, is_right = target.embedding_VD[vocabulary_V], []
    for begin in range(0, len(held_out.tokens_BL), batch):
        given = held_out.batch(torch.arange(begin, min(begin + batch, len(held_out.tokens_BL)), device=target.device))
        wanted_BN = F.pad(given.tokens_BL[:, 2:].long(), (0, 1), value=-1)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            right = [vocabulary_V[F.linear(x, head_VD).argmax(-1)] == wanted_BN for x in chained(head, target, given, STEPS)]
        is_right.append(torch.stack(right).transpose(0, 1).cpu())
    right_BJN, answers_BL = torch.cat(is_right).tolist(), held_out.answers_BL.cpu().tolist()
    gained = {}
    for drafts in (2, 3, 4):
        tokens = steps = 0
        for right_JN, answers_L in zip(right_BJN, answers_BL, strict=True):
            ends = [at for at, is_answer in enumerate(answers_L) if is_answer]
            if not ends:
                continue
            last, at = ends[0], ends[-1]  # the first token of an answer is there before any draft is
            last, at = at, last
            while at < last:
                accepted = 0
                while accepted < drafts and at + accepted < last and right_JN[accepted][at - 1 + accepted]:
                    accepted += 1
                got = min(accepted + 1, last - at)
                at, tokens, steps = at + got, tokens + got, steps + 1
        gained[drafts] = tokens / max(steps, 1)
    rates = torch.cat(is_right)[:, 0][F.pad(held_out.answers_BL.cpu()[:, 2:], (0, 1))].float().mean()
    shown = ", ".join(f"{count} drafts {rate:.3f}" for count, rate in gained.items())
    print(f"held out: tokens a step with {shown}; the first draft is right in {rates:.1%}", flush=True)
    return gained
