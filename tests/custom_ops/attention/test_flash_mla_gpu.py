# ruff: noqa: E402 (Triton may be missing where there is no GPU)
"""FlashMLA's decodes of latent attention on Hopper, against the reference backend in float32, plain and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from compile_and_serve.custom_ops.attention.flash_mla import FLASH_MLA_PAGE, flash_mla_unsupported_reason
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from tests.support import attention_cases as cases
from tests.support.cuda import CUDA, random
from tests.support.numbers import relative_error

if reason := flash_mla_unsupported_reason(CUDA, torch.bfloat16, torch.bfloat16, 512, 64, FLASH_MLA_PAGE):
    pytest.skip(reason, allow_module_level=True)

NOPE, ROPE, VALUES, LATENT = 128, 64, 128, 512
SCALE, LIMIT = (NOPE + ROPE) ** -0.5, 2e-2


class Layers:
    """Layers of a step over one block table, each with its own inputs and cache, as a page of all layers holds them."""

    def __init__(self, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], heads: int, *, layers: int = 2, padding: int = 0) -> None:
        """padding: sequences of length 0 behind the others, with as many query tokens as the last one."""
        batch = cases.Batch(query_lens=query_lens, seq_lens=seq_lens, block_size=FLASH_MLA_PAGE)
        self.backend = TritonAttention()
        self.metadata, num_pages = cases.make_metadata(batch, self.backend)
        self.live = self.metadata.num_tokens
        if padding:
            self._pad(padding, query_lens[-1])
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            setattr(self.metadata, name, getattr(self.metadata, name).to(CUDA))
        pages = random(num_pages, layers, FLASH_MLA_PAGE, LATENT + ROPE)
        self.caches = [pages[:, layer] for layer in range(layers)]
        tokens = self.metadata.num_tokens
        self.inputs = random(tokens, heads * (NOPE + ROPE) + LATENT + ROPE)
        angles = torch.rand(tokens, ROPE // 2, device=CUDA).repeat(1, 2) * 6
        self.shared = [
            random(LATENT),
            angles.cos().bfloat16(),
            angles.sin().bfloat16(),
            random(heads * (NOPE + VALUES), LATENT) * LATENT**-0.5,
        ]
        self.heads = heads

    def _pad(self, padding: int, query_len: int) -> None:
        metadata, count = self.metadata, padding * query_len
        starts = metadata.query_start_loc[-1] + query_len * torch.arange(1, padding + 1, dtype=torch.int32)
        metadata.query_start_loc = torch.cat((metadata.query_start_loc, starts))
        metadata.seq_lens = torch.cat((metadata.seq_lens, torch.zeros(padding, dtype=torch.int32)))
        metadata.block_table = torch.cat((metadata.block_table, metadata.block_table[-1:].expand(padding, -1)))
        metadata.slot_mapping = torch.cat((metadata.slot_mapping, torch.full((count,), -1)))
        metadata.num_seqs += padding  # as in a step that a graph is captured of
        metadata.num_tokens += count

    def operands(self, cache: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> LatentOperands:
        q_THE = self.inputs[:, : self.heads * (NOPE + ROPE)].view(-1, self.heads, NOPE + ROPE)
        args = [q_THE, self.inputs[:, self.heads * (NOPE + ROPE) :], *self.shared]
        return LatentOperands(*(one.to(dtype) for one in args), cache, SCALE)

    def run(self) -> list[torch.Tensor]:
        return [self.backend.mla_forward(self.operands(cache), self.metadata) for cache in self.caches]

    def expected(self) -> list[torch.Tensor]:
        """[live tokens, H, V] of each layer, in float32. The cache holds the step's entries already, and is written again."""
        metadata, count = self.metadata, int((self.metadata.seq_lens > 0).sum())
        live = AttentionMetadata(
            backend=None,
            query_start_loc=metadata.query_start_loc[: count + 1],
            seq_lens=metadata.seq_lens[:count],
            block_table=metadata.block_table[:count],
            slot_mapping=metadata.slot_mapping,
            num_seqs=count,
            num_tokens=self.live,
            max_query_len=metadata.max_query_len,
            max_seq_len=int(metadata.seq_lens.max()),
        )
        reference = TorchAttention()
        return [reference.mla_forward(self.operands(cache.clone(), torch.float32), live)[: self.live] for cache in self.caches]

    def check(self, outs: list[torch.Tensor]) -> None:
        for out, expected in zip(outs, self.expected(), strict=True):
            assert relative_error(out[: self.live], expected.double()) < LIMIT
            assert not out[self.live :].any(), "padding has other values than zeros"


LENGTHS = (1, 63, 64, 65, 4096, 700, 128, 2)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("count", [1, 3, 8, 100, 200])  # above 64 tokens, cuBLAS multiplies by the heads' weights
def test_decodes(count: int, heads: int) -> None:
    lengths = tuple(LENGTHS[i % len(LENGTHS)] if i < 16 else 65 + i for i in range(count))
    layers = Layers((1,) * count, lengths, heads, padding=0 if count == 1 else 2)
    outs = layers.run()
    assert layers.backend._latent_decodes is not None
    layers.check(outs)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query_len", [2, 4, 8])
def test_drafts(query_len: int, heads: int) -> None:
    """Their last tokens read all entries, those before them one less each; also where the entries begin in the same page."""
    layers = Layers((query_len,) * 5, (query_len, 64, 65, 4096, 66), heads, padding=2)
    outs = layers.run()
    assert layers.backend._latent_decodes is not None
    layers.check(outs)


def test_decodes_before_prompts_and_drafts() -> None:
    layers = Layers((1, 1, 1, 3, 100), (64, 700, 1, 90, 300), 16)
    outs = layers.run()
    assert layers.backend._latent_decodes is not None
    assert layers.backend._latent_decodes.num_tokens == 3
    layers.check(outs)


@pytest.mark.parametrize(("query_len", "count"), [(1, 40), (1, 100), (3, 8)])
def test_graphs_serve_other_lengths(query_len: int, count: int) -> None:
    """Each replay has new lengths and queries: one that read what an earlier kernel had not written yet would be another's."""
    most = tuple(4096 if i % 5 == 0 else 300 + 7 * i for i in range(count))
    layers = Layers((query_len,) * count, most, 16, layers=4, padding=2)
    layers.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers.run()
    generator = torch.Generator().manual_seed(0)
    metadata = layers.metadata
    places = torch.arange(query_len, device=CUDA) - query_len
    for _ in range(10):
        shorter = torch.tensor([int(torch.randint(query_len, length + 1, (1,), generator=generator)) for length in most])
        metadata.seq_lens[:count] = shorter.to(CUDA)
        positions = (metadata.seq_lens[:count, None].long() + places).clamp(min=0)
        pages = metadata.block_table[:count].long().gather(1, positions // FLASH_MLA_PAGE)
        metadata.slot_mapping[: layers.live] = (pages * FLASH_MLA_PAGE + positions % FLASH_MLA_PAGE).flatten()
        layers.inputs.copy_(random(*layers.inputs.shape))
        graph.replay()
        layers.check(outs)
