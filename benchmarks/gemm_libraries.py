"""Libraries' kernels beside ours at shapes that matter, on a Hopper GPU. Prints JSON lines: what wins should replace the other.

usage: python -m benchmarks.gemm_libraries [--work bf16,fp8,fp8-block,int4,latent] [--libraries ours,quack] [--sites qkv,o]
           [--shapes llama-8b] [--tokens 4096,16384] [--few-tokens 16,64,128,256]

bf16, fp8, fp8-block: prompts. Both sides get the operand quantized. gate_up includes SiLU-mul and, with 8 bits, the quantization of its
result; o and down include the residual. int4: codes in groups of 128 with zero points, as AWQ has them; the weights come from memory.
latent: attention of 64 decodes over 4096 latent entries each, with 16 heads.
A library's kernel that ends earlier is followed by our elementwise kernels. Each result is first compared with float32 on some rows:
`error` is relative. `us`: of a replayed CUDA graph. `best`: microseconds by library, at the end of each case. A library that is missing,
or has no kernel for a case, has a row with the reason.
quack: quack-kernels (CuTe DSL). deep_gemm: sgl-deep-gemm. sgl_kernel: sglang-kernel. humming: humming-kernels. flash_mla: sgl-flash-mla.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu_timing import emit, event_ms, relative_error, time_ms
from benchmarks.mla_gpu import LATENT, PAGE, ROPE, SCALE
from benchmarks.ops_gpu import DTYPE, Shape
from benchmarks.ops_gpu_quantized import build_products, copies_of, linear_of
from compile_and_serve.custom_ops.attention.triton_mla_decode import absorbed_attention
from compile_and_serve.custom_ops.linear.silu_mul_gemm import silu_mul_library
from compile_and_serve.custom_ops.linear.triton_elementwise import silu_mul_rows
from compile_and_serve.custom_ops.linear.triton_linear import fused_linear
from compile_and_serve.custom_ops.quantization import dequantize_weight, group_major_scales
from compile_and_serve.custom_ops.quantized.cuda_group_linear import GroupLinear
from compile_and_serve.custom_ops.quantized.cuda_linear import QuantizedLinear
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP
from compile_and_serve.custom_ops.quantized.group_layout import pack_codes_triton, pack_scales_triton
from compile_and_serve.custom_ops.triton_quantize import quantize_rows

GROUP = 128
FLASH_MLA_PAGE = 64  # tokens of a page; its kernel takes no others
ROWS = 48  # of a result that are checked
LIMIT, QUANTIZED_LIMIT = 1e-2, 4e-2  # relative errors, of bfloat16 and of float8 results
AWQ_NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where AWQ keeps each of 8 adjacent outputs in a word
QUACK_TILES = ((128, 256, 2, False), (128, 192, 2, True))  # M, N, cluster, pingpong

Run = Callable[[torch.Tensor], Any]


class Candidate(NamedTuple):
    """A kernel: `run(weight)` gives the case's result. weight: in the kernel's layout; clones of it may be passed instead."""

    kernel: str
    run: Run
    weight: torch.Tensor


class Case(NamedTuple):
    """A linear of a layer. linear: what our op takes. weight: [O, I] in bfloat16, or 4-bit codes with their scales and
    zero points; empty where `linear` holds it in 8 bits."""

    site: str
    x_TI: torch.Tensor
    weight: tuple[torch.Tensor, ...]
    silu_mul: bool
    residual_TO: torch.Tensor | None
    linear: Any
    quantizes: bool  # SiLU-mul's result, for the next linear

    @property
    def operand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x in 8 bits, and its scales."""
        assert isinstance(self.linear, QuantizedLinear)
        assert self.linear.quantized is not None
        return self.linear.quantized

    def rest(self, y_TO: torch.Tensor) -> Any:
        """What follows a plain product, by our kernels."""
        y_TO = silu_mul_rows(y_TO) if self.silu_mul else y_TO
        return self.end(y_TO if self.residual_TO is None else y_TO + self.residual_TO)

    def end(self, y_TO: torch.Tensor) -> Any:
        return quantize_rows(y_TO, torch.float8_e4m3fn, per_group=self.linear.scale.dim() == 2) if self.quantizes else y_TO

    def reference(self, rows: torch.Tensor) -> torch.Tensor:
        x_RI = self.x_TI[rows].float()
        if isinstance(self.linear, QuantizedLinear):
            x_RI = _dequantized(self.operand, rows)
            weight_OI = dequantize_weight(self.linear.weight_OI, self.linear.scale, torch.float32)
        elif isinstance(self.linear, GroupLinear):
            codes, scale, zeros = self.weight
            weight_OI = (codes.float() - _per_input(zeros)) * _per_input(scale)
        else:
            weight_OI = self.weight[0].float()
        y_RO = x_RI @ weight_OI.T
        if self.silu_mul:
            gate, up = y_RO.chunk(2, -1)
            y_RO = F.silu(gate) * up
        return y_RO if self.residual_TO is None else y_RO + self.residual_TO[rows].float()


def _per_input(values_OG: torch.Tensor) -> torch.Tensor:
    return values_OG.float().repeat_interleave(GROUP, 1)


def _dequantized(pair: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    values, scale = pair[0][rows].float(), pair[1][rows]
    return values * (scale if scale.shape[1] == 1 else scale.repeat_interleave(GROUP, 1)[:, : values.shape[1]])


def make_case(work: str, shape: Shape, site: str, num_tokens: int) -> Case:
    how, (rows, columns) = shape.sites()[site], shape.sizes()[site]
    silu_mul = how.get("silu_mul", False)
    x_TI = torch.randn(num_tokens, columns, device="cuda").to(DTYPE)
    stored = rows // 2 if silu_mul else rows
    residual_TO = torch.randn(num_tokens, stored, device="cuda").to(DTYPE) if how.get("residual") else None
    if work == "bf16":
        weight_OI = torch.empty(rows, columns, dtype=DTYPE, device="cuda").normal_(std=columns**-0.5)
        return Case(site, x_TI, (weight_OI,), silu_mul, residual_TO, None, False)
    if work == "int4":
        codes, zeros = (torch.randint(0, 16, (rows, n), device="cuda", dtype=torch.uint8) for n in (columns, columns // GROUP))
        scale = ((torch.rand(rows, columns // GROUP, device="cuda") + 0.5) * 0.2 * columns**-0.5).to(DTYPE)
        packed, offset = pack_codes_triton(codes, 4), pack_scales_triton(zeros)
        group_linear = GroupLinear(
            x_TI=x_TI, packed=packed, scale=pack_scales_triton(scale.half()), offset=offset, out_features=rows, bits=4, group_size=GROUP,
            silu_mul=silu_mul, residual_TO=residual_TO,
        )  # fmt: skip
        return Case(site, x_TI, (codes, scale, zeros), silu_mul, residual_TO, group_linear, False)
    linear = linear_of(shape, site, num_tokens, work)
    values, x_scale = linear.operand()
    assert x_scale is not None
    linear = replace(linear, quantized=(values, x_scale), norm_weight_I=None)
    return Case(site, linear.x_TI, (), silu_mul, linear.residual_TO, linear, silu_mul)


def ours(case: Case) -> Iterable[Candidate]:
    linear = case.linear
    if linear is None:
        [weight_OI] = case.weight
        yield Candidate("fused_linear", lambda w: fused_linear(case.x_TI, w, len(w), silu_mul=case.silu_mul, residual_TO=case.residual_TO),
                        weight_OI)  # fmt: skip
        return
    stored = linear.packed if isinstance(linear, GroupLinear) else linear.weight_OI
    for kernel in linear.kernels():
        run = (_with_group_major_scales(linear) if kernel in DEEP else linear).run
        yield Candidate(kernel, lambda w, kernel=kernel, run=run: case.end(run(kernel, w)), stored)  # type: ignore[misc]


def _with_group_major_scales(linear: QuantizedLinear) -> QuantizedLinear:
    """As the linear would quantize x for the kernel."""
    assert linear.quantized is not None
    values, x_scale = linear.quantized
    return replace(linear, quantized=(values, group_major_scales(x_scale.shape[0], x_scale.shape[1], x_scale.device).copy_(x_scale)))


@functools.cache
def _quack_epilogues() -> tuple[Any, Any]:
    """Of products, and of products with SiLU-mul over interleaved outputs; both with scales by row and column and with a residual."""
    from quack.activation import swiglu
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.math import unpack
    from quack.epilogue.ops import ColVecLoad, RowVecLoad

    vectors = {"xs": ColVecLoad("xs"), "ws": RowVecLoad("ws")}

    @gemm_epilogue(ops=vectors)
    def scaled(acc, xs, ws):  # type: ignore[no-untyped-def]
        return {"D": acc * xs * ws}

    @gemm_epilogue(ops=vectors)
    def scaled_residual(acc, c, xs, ws):  # type: ignore[no-untyped-def]
        return {"D": acc * xs * ws + c}

    @gemm_epilogue(outputs=("postact",), mode="acc_pair", ops=vectors)
    def scaled_swiglu(acc, xs, ws):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc * xs * ws)
        return {"postact": swiglu(gate, up)}

    return {False: scaled, True: scaled_residual}, scaled_swiglu


def quack(case: Case) -> Iterable[Candidate]:
    if isinstance(case.linear, GroupLinear):
        from quack.gemm_w4 import gemm_w4a16, prepare_w4_weight

        codes, scale, zeros = case.weight
        blob, strip = prepare_w4_weight(codes[:, ::2] | codes[:, 1::2] << 4, (scale, zeros), "int4awq")
        yield Candidate("w4a16", lambda w: case.rest(gemm_w4a16(case.x_TI, w, strip, wformat="int4awq")), blob)
        return
    products, gated = _quack_epilogues()
    if case.linear is None:
        x, weight = case.x_TI, case.weight[0]
        xs, ws = torch.ones(1, len(x), device="cuda"), torch.ones(1, len(weight), device="cuda")
    else:
        (x, x_scale), weight = case.operand, case.linear.weight_OI
        xs, ws = x_scale.view(1, -1), case.linear.scale.view(1, -1)
        if case.linear.scale.dim() == 2:
            raise NotImplementedError("its blocks for Hopper have scales of powers of two")
    if case.silu_mul:  # it pairs adjacent outputs
        weight, ws = weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1), ws.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    weight, ws = weight.contiguous(), ws.contiguous()
    out = torch.empty(len(x), len(weight) // (2 if case.silu_mul else 1), dtype=DTYPE, device="cuda")
    for tile_m, tile_n, cluster, pingpong in QUACK_TILES:
        tiles: dict[str, Any] = {"tile_M": tile_m, "tile_N": tile_n, "cluster_M": cluster, "cluster_N": 1, "pingpong": pingpong}
        if x.itemsize == 1:
            tiles["post_init_attrs"] = (("fp8_slow_accum", False),)  # our kernels add up in the tensor cores alone, too

        def run(w: torch.Tensor, tiles: dict[str, Any] = tiles) -> Any:
            if case.silu_mul:
                gated.gemm(x, w, None, epi_args={"xs": xs, "ws": ws, "postact": out}, **tiles)
            else:
                residual = case.residual_TO
                products[residual is not None].gemm(x, w, out, residual, epi_args={"xs": xs, "ws": ws}, **tiles)
            return case.end(out)

        yield Candidate(f"{tile_m}x{tile_n} cluster {cluster}{' pingpong' * pingpong}", run, weight)


def deep_gemm(case: Case) -> Iterable[Candidate]:
    import deep_gemm as library

    if case.linear is None:
        out = torch.empty(len(case.x_TI), len(case.weight[0]), dtype=DTYPE, device="cuda")
        yield Candidate("bf16_gemm_nt", lambda w: (library.bf16_gemm_nt(case.x_TI, w, out), case.rest(out))[1], case.weight[0])
    elif isinstance(case.linear, QuantizedLinear) and case.linear.scale.dim() == 2:
        x, x_scale = case.operand
        x_scale, scale = x_scale.t().contiguous().t(), case.linear.scale
        out = torch.empty(len(x), len(case.linear.weight_OI), dtype=DTYPE, device="cuda")
        run: Run = lambda w: (library.fp8_gemm_nt((x, x_scale), (w, scale), out), case.rest(out))[1]  # noqa: E731
        yield Candidate("fp8_gemm_nt", run, case.linear.weight_OI)
    else:
        raise NotImplementedError("it has bfloat16, and float8 in blocks")


def sgl_kernel(case: Case) -> Iterable[Candidate]:
    _load("sgl_kernel", "sm90/common_ops*.so")
    ops = torch.ops.sgl_kernel
    if not isinstance(case.linear, QuantizedLinear):
        raise NotImplementedError("it has float8 products")
    (x, x_scale), scale = case.operand, case.linear.scale
    if scale.dim() == 1:
        run: Run = lambda w: case.rest(ops.fp8_scaled_mm(x, w.t(), x_scale, scale[:, None], DTYPE, None))  # noqa: E731
    else:
        by_column = x_scale.t().contiguous().t()
        run = lambda w: case.rest(ops.fp8_blockwise_scaled_mm(x, w.t(), by_column, scale.t(), DTYPE))  # noqa: E731
    yield Candidate("fp8_scaled_mm" if scale.dim() == 1 else "fp8_blockwise_scaled_mm", run, case.linear.weight_OI)


def humming(case: Case) -> Iterable[Candidate]:
    from humming.forward import humming_forward
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    if not isinstance(case.linear, GroupLinear):
        raise NotImplementedError("it is measured with 4 bits")
    codes, scale, zeros = case.weight
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    layer = HummingLayer(shape_n=codes.shape[0], shape_k=codes.shape[1], weight_config=config, torch_dtype=DTYPE).cuda()
    layer.load_from_tensors({"qweight": _awq_words(codes.t()), "scales": scale.t().contiguous(), "qzeros": _awq_words(zeros.t())})
    layer.transform()
    ranges = get_heuristics_config(layer_config=layer.humming_config, device=case.x_TI.device)  # it would compile the kernels of all
    more = {name: getattr(layer, name, None) for name in ("weight_scale", "zero_point", "weight_scale_2", "locks")}
    more["tuning_config"] = next(config for low, high, config in ranges if low < len(case.x_TI) <= high)
    run: Run = lambda w: case.rest(humming_forward(layer.humming_config, inputs=case.x_TI, weight=w, **more))  # noqa: E731
    yield Candidate("humming_gemm", run, layer.weight.data)


def _awq_words(codes_IO: torch.Tensor) -> torch.Tensor:
    shifts = (AWQ_NIBBLES * 4).to(codes_IO.device)
    words = (codes_IO.long().unflatten(1, (-1, 8)) << shifts).sum(-1)
    return (words - (words >> 31 << 32)).int()


def _load(package: str, pattern: str) -> None:
    found = find_spec(package)
    if found is None:
        raise ImportError(f"{package} is not installed")
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    torch.ops.load_library(str(next(file for folder in folders for file in sorted(folder.glob(pattern)))))


LINEARS: dict[str, Callable[[Case], Iterable[Candidate]]] = {
    "ours": ours,
    "quack": quack,
    "deep_gemm": deep_gemm,
    "sgl_kernel": sgl_kernel,
    "humming": humming,
}


def measure(
    library: str, make: Callable[[], Iterable[Candidate]], check: Callable[[Any], tuple[float, float]], few: bool, row: Any
) -> float:
    """Check and time the kernels of a library. → microseconds of the fastest that is right"""
    best = float("inf")
    try:
        for candidate in make():
            try:
                error, limit = check(candidate.run(candidate.weight))
                copies = copies_of(candidate.weight, 1 if few else 1 << 20, candidate.weight.nbytes)
                us = _milliseconds(candidate.run, copies) * 1e3 / len(copies)
                emit(**row, library=library, kernel=candidate.kernel, us=round(us, 2), error=float(f"{error:.2e}"), ok=error < limit)
                best = min(best, us) if error < limit else best
            except Exception as failure:
                emit(**row, library=library, kernel=candidate.kernel, failed=repr(failure)[:300])
    except (Exception, SystemExit) as failure:  # it is missing, or has no kernel for this
        emit(**row, library=library, skipped=repr(failure)[:300])
    return best


def _milliseconds(run: Run, weights: list[torch.Tensor]) -> float:
    def all_weights() -> None:
        for weight in weights:
            run(weight)

    try:
        return time_ms(all_weights, 15.0)
    except RuntimeError:  # it cannot be captured
        torch.cuda.synchronize()
        return event_ms(all_weights)


def linears(work: str, shape: Shape, site: str, num_tokens: int, libraries: list[str]) -> None:
    case = make_case(work, shape, site, num_tokens)
    rows = torch.randint(num_tokens, (ROWS,), device="cuda")
    expected = case.reference(rows)

    def check(out: Any) -> tuple[float, float]:
        if isinstance(out, tuple):
            return relative_error(_dequantized(out, rows), expected), QUANTIZED_LIMIT
        return relative_error(out[rows], expected), LIMIT

    row = {"work": work, "model": shape.name, "site": site, "tokens": num_tokens}
    best = {
        library: measure(library, functools.partial(LINEARS[library], case), check, work == "int4", row)
        for library in libraries
        if library in LINEARS
    }
    emit(**row, best={library: round(us, 2) for library, us in best.items() if us < float("inf")})


def latent(libraries: list[str], count: int = 64, length: int = 4096, heads: int = 16) -> None:
    q = torch.randn(count, heads, LATENT + ROPE, device="cuda").to(DTYPE)
    pages = count * length // FLASH_MLA_PAGE
    cache = torch.randn(pages, FLASH_MLA_PAGE, LATENT + ROPE, device="cuda").to(DTYPE)
    table = torch.randperm(pages, device="cuda").int().view(count, -1)
    lengths = torch.full((count,), length, dtype=torch.int32, device="cuda")
    keys = cache[table[0].long()].flatten(0, 1).float()
    expected = (q[0].float() @ keys.T * SCALE).softmax(-1) @ keys[:, :LATENT]  # of the first sequence
    per_page = FLASH_MLA_PAGE // PAGE
    small_table = (table[:, :, None] * per_page + torch.arange(per_page, device="cuda")).flatten(1).int()
    starts = torch.arange(count + 1, device="cuda", dtype=torch.int32)
    q_latent, q_rope = q[:, :, :LATENT].transpose(0, 1).contiguous(), q[:, :, LATENT:].contiguous()

    def own() -> Iterable[Candidate]:
        out = torch.empty_like(q_latent)

        def run(w: torch.Tensor) -> torch.Tensor:
            absorbed_attention(q_latent, q_rope, w, SCALE, starts, lengths, small_table, out, 0, count, 1)
            return out.transpose(0, 1)

        yield Candidate("absorbed_attention", run, cache.view(-1, PAGE, LATENT + ROPE))

    def flash_mla() -> Iterable[Candidate]:
        _load("flash_mla", "_C_legacy*.so")
        ops = torch.ops.flash_mla_legacy
        plan = ops.get_mla_decoding_metadata(lengths, heads, 1, heads, False, None)
        common = q[:, None], LATENT, lengths, table, SCALE, False, *plan
        yield Candidate("dense_decode_fwd", lambda w: ops.dense_decode_fwd(common[0], w, *common[1:])[0][:, 0], cache[:, :, None])

    def sgl() -> Iterable[Candidate]:
        _load("sgl_kernel", "flashmla_ops*.so")
        ops = torch.ops.sgl_kernel
        plan = ops.get_mla_decoding_metadata(lengths, heads, 1, heads, False, None)
        common = LATENT, lengths, table, SCALE, False, *plan, False, None
        yield Candidate("fwd_kvcache_mla", lambda w: ops.fwd_kvcache_mla(q[:, None], w, *common)[0][:, 0], cache[:, :, None])

    row = {"work": "latent", "seqs": count, "seq_len": length, "heads": heads, "floor_us": round(cache.nbytes / 4.09e6, 1)}
    best: dict[str, float] = {}
    for library, make in {"ours": own, "flash_mla": flash_mla, "sgl_kernel": sgl}.items():
        if library in libraries:
            best[library] = measure(library, make, lambda out: (relative_error(out[0], expected), LIMIT), False, row)
    emit(**row, best={library: round(us, 2) for library, us in best.items() if us < float("inf")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="fp8,int4,latent,bf16,fp8-block")
    parser.add_argument("--libraries", default=",".join((*LINEARS, "flash_mla")))
    parser.add_argument("--shapes", default="llama-8b", help="names of folders in benchmarks/configs")
    parser.add_argument("--sites", default="qkv,o,gate_up,down")
    parser.add_argument("--tokens", default="4096,16384", help="of prompts")
    parser.add_argument("--few-tokens", default="16,64,128,256", help="with 4 bits")
    args = parser.parse_args()
    libraries = args.libraries.split(",")
    torch.manual_seed(0)
    with torch.no_grad():
        for work in args.work.split(","):
            if work == "latent":
                latent(libraries)
                continue
            if "ours" in libraries:
                if work.startswith("fp8"):
                    build_products(per_block=work == "fp8-block")
                else:
                    silu_mul_library().build()
            for shape in map(Shape, args.shapes.split(",")):
                for num_tokens in map(int, (args.few_tokens if work == "int4" else args.tokens).split(",")):
                    for site in args.sites.split(","):
                        linears(work, shape, site, num_tokens, libraries)
                        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
