"""SmolLM2 in plain PyTorch, whole batches at a time: it writes conversations, and gives the hidden states that a draft head reads.

Shape legend: B sequences, L tokens, D hidden size, H query heads, K key/value heads, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.runtime.weights import iter_tensors, read_config

BEGIN, END = 1, 2  # <|im_start|> and <|im_end|>
MIN_P = 0.05  # of questions that the model asks itself
MAX_QUESTION = 128  # tokens

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Layer:
    norm_D: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm_D: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Target:
    """taps: the layers whose inputs `states` gives."""

    def __init__(self, path: Path, device: torch.device) -> None:
        config: Any = read_config(path)
        self.dtype, self.device = torch.bfloat16 if device.type == "cuda" else torch.float32, device
        self.hidden_size, num_layers = config["hidden_size"], config["num_hidden_layers"]
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, self.eps = self.hidden_size // self.num_heads, config["rms_norm_eps"]
        self.theta = (config.get("rope_parameters") or config)["rope_theta"]
        self.taps = (2, num_layers // 2, num_layers - 3)
        tensors = {name: tensor.to(device, self.dtype) for name, tensor in iter_tensors(path)}
        self.embedding_VD = tensors["model.embed_tokens.weight"]
        self.norm_D = tensors["model.norm.weight"]
        self.layers = []
        for i in range(num_layers):
            own = {name.removeprefix(f"model.layers.{i}."): one for name, one in tensors.items() if name.startswith(f"model.layers.{i}.")}
            self.layers.append(
                Layer(
                    norm_D=own["input_layernorm.weight"],
                    qkv=torch.cat([own[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
                    out=own["self_attn.o_proj.weight"],
                    mlp_norm_D=own["post_attention_layernorm.weight"],
                    gate_up=torch.cat([own[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]),
                    down=own["mlp.down_proj.weight"],
                )
            )

    def rope(self, positions_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [L, E]."""
        inverse = self.theta ** -(torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim)
        angles_LE = torch.outer(positions_L.float(), inverse).repeat(1, 2)
        return angles_LE.cos(), angles_LE.sin()

    def states(self, tokens_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of the layers `taps` side by side [B, L, 3 D], and those behind the last norm [B, L, D]."""

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return self._run(tokens_BL, torch.arange(tokens_BL.shape[1], device=self.device), attend)

    def _run(self, tokens_BL: torch.Tensor, positions_L: torch.Tensor, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        x, (cos_LE, sin_LE) = F.embedding(tokens_BL, self.embedding_VD), self.rope(positions_L)
        cos_LE, sin_LE = cos_LE.to(self.dtype), sin_LE.to(self.dtype)
        sizes = [count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        taps = []
        for i, layer in enumerate(self.layers):
            if i in self.taps:
                taps.append(x)
            qkv = F.linear(F.rms_norm(x, (self.hidden_size,), layer.norm_D, self.eps), layer.qkv).split(sizes, dim=-1)
            q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in qkv)
            mixed = attend(i, rotated(q, cos_LE, sin_LE), rotated(k, cos_LE, sin_LE), v)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)
            gate, up = F.linear(F.rms_norm(x, (self.hidden_size,), layer.mlp_norm_D, self.eps), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return torch.cat(taps, dim=-1), F.rms_norm(x, (self.hidden_size,), self.norm_D, self.eps)

    @torch.inference_mode()
    def conversations(
        self,
        prompts_BP: torch.Tensor,
        lengths_B: torch.Tensor,
        asks_B: torch.Tensor,
        temperatures_B: torch.Tensor,
        to_answer: list[int],
        to_question: list[int],
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, L] tokens, and bool [B, L]: whether a token belongs to an answer.

        prompts_BP: what sequences begin with, `lengths_B` tokens of it. asks_B: whether a sequence goes on with a question of the user's,
        which the model makes up (Magpie, arXiv:2406.08464), or with an answer. temperatures_B: of answers. to_answer, to_question: the
        tokens between a question and an answer, and between an answer and the next question.
        """
        size, device = len(prompts_BP), self.device
        shape = (len(self.layers), 2, size, self.num_kv_heads, length, self.head_dim)
        cache = torch.empty(shape, dtype=self.dtype, device=device)
        forced = torch.zeros(2, max(len(to_answer), len(to_question)), dtype=torch.int64, device=device)
        for row, tokens in enumerate((to_answer, to_question)):
            forced[row, : len(tokens)] = torch.tensor(tokens)
        forced_lens = torch.tensor([len(to_answer), len(to_question)], device=device)
        tokens_BL = torch.zeros(size, length, dtype=torch.int64, device=device)
        answers_BL = torch.zeros(size, length, dtype=torch.bool, device=device)
        tokens_BL[:, 0] = prompts_BP[:, 0]
        answering, between = ~asks_B, torch.full((size,), -1, device=device)  # between: row of `forced`; -1: none
        place, asked = torch.zeros_like(between), torch.zeros_like(between)
        for at in range(1, length):
            logits_BV = self._next_logits(tokens_BL[:, at - 1 : at], at - 1, cache)
            lowest = logits_BV.amax(dim=1, keepdim=True) + torch.tensor(MIN_P).log()
            logits_BV.masked_fill_((logits_BV < lowest) & ~answering[:, None], -torch.inf)
            noise_BV = torch.empty_like(logits_BV).exponential_().log_().neg_()
            drawn = (logits_BV + noise_BV * torch.where(answering, temperatures_B, 1.0)[:, None]).argmax(dim=1)
            drawn = torch.where(~answering & (asked >= MAX_QUESTION), END, drawn)
            in_prompt, is_between = lengths_B > at, between >= 0
            if at < prompts_BP.shape[1]:
                drawn = torch.where(in_prompt, prompts_BP[:, at], drawn)
            token = torch.where(is_between & ~in_prompt, forced[between.clamp(min=0), place.clamp(max=forced.shape[1] - 1)], drawn)
            is_free = ~in_prompt & ~is_between
            tokens_BL[:, at], answers_BL[:, at] = token, is_free & answering
            asked = torch.where(is_free & ~answering, asked + 1, 0)
            place = torch.where(is_between, place + 1, 0)
            is_over = is_between & (place >= forced_lens[between.clamp(min=0)])
            answering = torch.where(is_over, between == 0, answering)
            between = torch.where(is_over, -1, between)
            between = torch.where(is_free & (token == END), answering.long(), between)
        return tokens_BL, answers_BL

    def _next_logits(self, tokens_B1: torch.Tensor, position: int, cache: torch.Tensor) -> torch.Tensor:
        """float32 [B, V]"""

        def attend(i: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache[i, 0, :, :, position], cache[i, 1, :, :, position] = k[:, :, 0], v[:, :, 0]
            keys, values = cache[i, :, :, :, : position + 1]
            # The query heads of a key/value head are as many queries of that head, so that its keys are read once.
            grouped = q.view(len(q), self.num_kv_heads, -1, self.head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values).reshape(q.shape)

        _, last = self._run(tokens_B1, torch.tensor([position], device=self.device), attend)
        return F.linear(last[:, 0], self.embedding_VD).float()


def rotated(x: torch.Tensor, cos_LE: torch.Tensor, sin_LE: torch.Tensor) -> torch.Tensor:
    """RoPE of [B, H, L, E]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos_LE + torch.cat((-second, first), dim=-1) * sin_LE
