"""The pipeline, in order. Each pass is one file, whose docstring says what it rewrites and why.

1. functionalize                 in-place writes become new tensors
2. canonicalize                  one spelling for each op; unused lengths are removed
3. drop_batch_axis               a model written for batches computes on [tokens, …]
4. eliminate_noops               remove views, casts and dropouts that change nothing
5. lift_norms                    an RMSNorm written in simple ops becomes one op
6. expert_parallel               experts are spread over ranks; tokens come to them and results back
7. tensor_parallel               shard weights over ranks; insert collectives
8. merge_linears                 linears over the same input become one (QKV, gate/up)
9. apply_lora                    linears, embeddings and experts add the contribution of each token's LoRA adapter
10. select_rows_early            the last layer computes only the rows whose logits are needed
11. fuse_rope_attention          QK-norm + RoPE + KV write + attention become one op between the pieces
12. fuse_allreduce_add_rms_norm  the ranks' sum, the residual and the next norm become one op
13. quantize_linears             linears over 8-bit weights, if asked for
14. quantize_experts             the same for experts
15. fuse_allreduce_quantize      the fused all-reduce also quantizes the norm to float8, for linears that would quantize it
16. fuse_linears                 RMSNorm → linear → SiLU-mul | + residual become one op over a packed weight
17. fuse_experts                 experts add the residual; their weights are packed for the CPU's kernels
18. fuse_silu_mul                SiLU-mul outside of fused linears becomes one op, where that is measured to be faster
19. fuse_add_rms_norm            the same for residual add + RMSNorm
20. sort_adapters                tokens are sorted by their LoRA adapter once per step
"""

from __future__ import annotations

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.passes.apply_lora import ApplyLora
from compile_and_serve.compiler.passes.canonicalize import Canonicalize
from compile_and_serve.compiler.passes.drop_batch_axis import DropBatchAxis
from compile_and_serve.compiler.passes.eliminate_noops import EliminateNoops
from compile_and_serve.compiler.passes.expert_parallel import ExpertParallel
from compile_and_serve.compiler.passes.functionalize import Functionalize
from compile_and_serve.compiler.passes.fuse_add_rms_norm import FuseAddRmsNorm
from compile_and_serve.compiler.passes.fuse_allreduce_add_rms_norm import FuseAllreduceAddRmsNorm
from compile_and_serve.compiler.passes.fuse_allreduce_quantize import FuseAllreduceQuantize
from compile_and_serve.compiler.passes.fuse_experts import FuseExperts
from compile_and_serve.compiler.passes.fuse_linears import FuseLinears
from compile_and_serve.compiler.passes.fuse_rope_attention import FuseRopeAttention
from compile_and_serve.compiler.passes.fuse_silu_mul import FuseSiluMul
from compile_and_serve.compiler.passes.lift_norms import LiftNorms
from compile_and_serve.compiler.passes.merge_linears import MergeLinears
from compile_and_serve.compiler.passes.quantize_experts import QuantizeExperts
from compile_and_serve.compiler.passes.quantize_linears import QuantizeLinears
from compile_and_serve.compiler.passes.select_rows_early import SelectRowsEarly
from compile_and_serve.compiler.passes.sort_adapters import SortAdapters
from compile_and_serve.compiler.passes.tensor_parallel import TensorParallel
from compile_and_serve.compiler.rewrite.graph_pass import GraphPass


def default_passes(config: CompileConfig | None = None) -> tuple[GraphPass, ...]:
    """The passes of a compilation, in order. Those for several ranks and for adapters only if there are any. None: default config."""
    config = config or CompileConfig()
    has_ranks, has_adapters = config.mesh.tensor > 1, config.max_loras > 0
    return (
        Functionalize(),
        Canonicalize(),
        DropBatchAxis(),
        EliminateNoops(),
        LiftNorms(),
        *((ExpertParallel(config.num_redundant_experts),) if config.enable_expert_parallel else ()),
        *((TensorParallel(),) if has_ranks else ()),
        MergeLinears(),
        *((ApplyLora(config.max_loras, config.max_lora_rank, config.lora_experts),) if has_adapters else ()),
        SelectRowsEarly(),
        FuseRopeAttention(),
        *((FuseAllreduceAddRmsNorm(),) if has_ranks else ()),
        QuantizeLinears(config.quantization, config.quantization_exclude),
        QuantizeExperts(config.quantization, config.quantization_exclude),
        *((FuseAllreduceQuantize(),) if has_ranks else ()),
        FuseLinears(),
        FuseExperts(),
        FuseSiluMul(),
        FuseAddRmsNorm(),
        *((SortAdapters(),) if has_adapters else ()),
    )
