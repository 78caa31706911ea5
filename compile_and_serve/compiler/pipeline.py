"""`compile_model`: the road from a plain module to a callable, with each stage timed and every shortcut checked.

    capture → passes → split → compile each distinct piece → stitch

With an artifact of the same key, capture, passes and split are skipped altogether (the plan is read instead), and pieces are
loaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.artifacts.autotune import Autotuner
from compile_and_serve.compiler.artifacts.cache_key import op_versions, piece_fields, plan_fields, toolchain_fields
from compile_and_serve.compiler.artifacts.store import ArtifactStore, Entry, default_root, key_of
from compile_and_serve.compiler.capture.capture import capture
from compile_and_serve.compiler.compat import no_garbage_collection
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.inductor import (
    CompiledPiece,
    PendingPiece,
    PieceCallable,
    PieceCompileError,
    load_pieces,
    start_inductor,
    start_piece,
)
from compile_and_serve.compiler.model import CompiledModel, EagerModel, JoinPieces, Model, ModelSource, StageCallback
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.quantize_linears import slow_reason
from compile_and_serve.compiler.pieces.executor import executor_source
from compile_and_serve.compiler.pieces.fingerprint import normalized_text
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, PieceStep, make_plan
from compile_and_serve.compiler.pieces.splitter import split
from compile_and_serve.compiler.reports.dump import Dump
from compile_and_serve.compiler.reports.profile import profile_model
from compile_and_serve.compiler.rewrite.graph_pass import GraphPass, PassContext, PassError, SkipReason
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.user_passes import with_user_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.tuning.store import tuning_folder

log = logging.getLogger(__name__)

PLAN, FORWARD = "plan.json", "forward.py"  # files of a plan's artifact
SOURCE, GRAPH, KERNELS = "piece.py", "graph.txt", "kernels"  # files of a piece's
TRIALS = "trials"  # in the work folder: what Inductor tried the C++ compiler with


def _ignore_stage(stage: str, seconds: float, detail: str) -> None: ...


def compile_model(
    spec: ModelSource,
    config: CompileConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: frozenset[str] = frozenset(),
    passes: Sequence[GraphPass] | None = None,
    attention_backends: Mapping[str, AttentionBackend] | None = None,
    kv_cache_dtype: torch.dtype | None = None,
    on_stage: StageCallback = _ignore_stage,
) -> Model:
    """Compile (or, in mode "eager", just wrap) a model for one device; weights are filled in afterwards through the result.

    kernels: names of the fused `cas` ops that have a kernel here, from `available_kernels` (passes that need another are
        left out).
    passes: instead of `default_passes()`; `config.user_passes` come in addition.
    attention_backends (by state group), kv_cache_dtype: what split ops are measured with (for `profile_tokens`; None: `dtype`).
        No piece sees the cache, so nothing else depends on them.
    on_stage: called with (stage, seconds, detail) when a stage ends.
    Raises `CaptureError`, `SplitError`, `PassError` or `PieceCompileError`.
    """
    if config.mode == "eager":
        if config.tensor_parallel_size > 1:
            raise PassError(
                f"An eager model cannot be sharded over {config.tensor_parallel_size} ranks, only a compiled one: "
                "leave out --enforce-eager, or use a tensor parallel size of 1."
            )
        if config.quantization is not None:
            raise PassError(
                "Quantization is a pass of the compiler, which an eager model goes without: leave out --quantization or "
                "--enforce-eager."
            )
        if config.disabled_passes or config.forced_passes:
            raise PassError(
                "An eager model goes through no passes that could be disabled or forced: leave out --disable-pass and --force-pass, or "
                "--enforce-eager."
            )
        return EagerModel(spec=spec, device=device, report={"mode": "eager"})
    if config.quantization is not None and spec.quantized_weights:
        raise PassError(
            f"The checkpoint is quantized already and cannot be quantized to {config.quantization}: leave out --quantization."
        )
    all_passes = with_user_passes(passes or default_passes(config), config.user_passes)
    names = [graph_pass.name for graph_pass in all_passes]
    # Asked here: an artifact of the same key may have been made without such a wish.
    for verb, wanted in (("force", config.forced_passes), ("disable", config.disabled_passes)):
        if unknown := wanted - set(names):
            raise PassError(f"Cannot {verb} unknown pass {sorted(unknown)[0]!r}: the passes are {', '.join(names)}.")
    job = _Compilation(spec, config, device, dtype, kernels, all_passes, on_stage,
                       attention_backends=attention_backends, kv_cache_dtype=kv_cache_dtype or dtype)  # fmt: skip
    return job.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _WantedPiece:
    """A distinct piece. piece: its fingerprint. number: its number in messages. fields: of its artifact. folder: where it is compiled."""

    piece: str
    graph: GraphModule
    number: str
    fields: dict[str, Any]
    folder: Path


@dataclass(slots=True)
class _Compilation:
    spec: ModelSource
    config: CompileConfig
    device: torch.device
    dtype: torch.dtype
    kernels: frozenset[str]
    passes: tuple[GraphPass, ...]
    on_stage: StageCallback
    kv_cache_dtype: torch.dtype
    report: dict[str, Any] = field(default_factory=lambda: {"mode": "compile", "stages": {}})
    stores: list[ArtifactStore] = field(default_factory=list)
    dump: Dump | None = None
    attention_backends: Mapping[str, AttentionBackend] | None = None
    useless: set[Path] = field(default_factory=set)  # artifacts that are whole and, one of them at least, do not load

    def run(self) -> CompiledModel:
        self.stores = _stores(self.config)
        fields = plan_fields(
            self.spec, self.passes, self.config.disabled_passes, self.kernels, self.device, self.dtype,
            self.config.tensor_parallel_size,
        )  # fmt: skip
        if self.config.forced_passes:
            fields["forced_passes"] = sorted(self.config.forced_passes)
        if self.config.verify_passes:  # a plan of its own: a pass may be left out of it, and its report has the errors
            fields["verified"] = True
        # Before any piece is loaded: this loads the kernels, and decides in which layout weights are packed.
        slow = slow_reason(self.config.quantization, self.spec.quantized_weights, self.device, self.dtype)
        if slow is not None:
            fields["slow_quantized_linears"] = True
            self.report["slow_quantized_linears"] = slow
        if self.config.dump_dir is not None:
            self.dump = Dump(self.config.dump_dir, self._facts(fields))
        # Inductor's files live in a folder of this process: nobody else can change them under a running model.
        work_dir = tempfile.TemporaryDirectory(
            prefix="compile-and-serve-", dir=self.config.work_dir, ignore_cleanup_errors=True
        )
        # What is dumped or measured is made here and now; an artifact has no captured graph.
        anew = self.dump is not None or bool(self.config.profile_tokens)
        found = None if anew else self._load(fields, Path(work_dir.name))
        if found is None:
            with contextlib.ExitStack() as stack:
                if self.stores:
                    stack.enter_context(self.stores[-1].lock(fields))
                # Whoever held the lock may have made it meanwhile.
                found = None if anew else self._load(fields, Path(work_dir.name))
                found = found or self._make(fields, Path(work_dir.name))
        plan, join_pieces = found
        self.report |= pass_summary(self.report["passes"])
        self.report |= {
            "pieces": len([s for s in plan.steps if isinstance(s, PieceStep)]),
            "distinct_pieces": len(plan.pieces),
        }
        if self.dump is not None:
            self.dump.finish(self.report)
        return CompiledModel(
            spec=self.spec,
            plan=plan,
            join_pieces=join_pieces,
            device=self.device,
            report=self.report,
            work_dir=work_dir,
        )

    def _load(self, fields: dict[str, Any], work_dir: Path) -> tuple[ExecutionPlan, JoinPieces] | None:
        """The whole model from artifacts, or None with the reason logged if any part is missing.

        The pieces load in a thread, so that the caller can read the weights meanwhile.
        """
        entry = self._get("plan", fields)
        if entry is None:
            return None
        try:
            stored = json.loads((entry.path / PLAN).read_text())
        except OSError as error:  # removed by somebody else meanwhile
            log.info("The artifact %s is gone: %s.", entry.path, error)
            return None
        plan, ops = ExecutionPlan.from_json(stored["plan"]), stored["ops"]
        entries = {}
        for piece in plan.pieces:
            piece_entry = self._get("piece", piece_fields(piece, ops[piece], self.device))
            if piece_entry is None:
                return None
            entries[piece] = piece_entry
        self.report |= {"passes": stored["passes"], "artifact": "hit", "artifact_key": entry.key}
        threads = ThreadPoolExecutor(1, thread_name_prefix="load-pieces")
        loading = threads.submit(_load_timed, entries, self.device, work_dir)
        threads.shutdown(wait=False)

        def join() -> Mapping[str, PieceCallable]:
            try:
                pieces, seconds = loading.result()
            except Exception as error:
                self._do_without(error, *entries.values())
                made_plan, join_made = self._make(fields, work_dir)
                if made_plan != plan:  # by which the weights have been read
                    raise PieceCompileError(
                        f"The artifact {entry.path} cannot be loaded ({type(error).__name__}: {error}), and what was made in its place "
                        "goes by other measured choices. It is kept: start once more."
                    ) from error
                return join_made()
            self._stage("load artifact", seconds, f"{len(pieces)} pieces beside the weights, {entry.path}")
            return {piece: compiled.run for piece, compiled in pieces.items()}

        return plan, join

    def _make(self, fields: dict[str, Any], work_dir: Path) -> tuple[ExecutionPlan, JoinPieces]:
        start = time.perf_counter()
        with start_inductor(self.device, work_dir / TRIALS) as wait:
            importing = time.perf_counter() - start
            with no_garbage_collection():
                plan, graphs, records = self._rewrite(wait)
            start = time.perf_counter()
            wait()
            self._stage("compile", importing + time.perf_counter() - start, "Inductor is imported")
            ops = {piece: op_versions(gm) for piece, gm in graphs.items()}
            pieces = self._make_pieces(plan, graphs, ops, work_dir)
        passes = [_pass_row(record) for record in records]
        self.report |= {"passes": passes, "artifact": "made", "artifact_key": key_of(fields)}
        content = {
            PLAN: json.dumps({"plan": plan.to_json(), "ops": ops, "passes": passes}),
            FORWARD: executor_source(plan),
        }
        if self.dump is None or self._get("plan", fields) is None:
            self._put("plan", fields, content, work_dir / "plan")
        if self.config.profile_tokens:
            self._profile(plan, graphs, pieces)
        return plan, lambda: pieces

    def _make_pieces(
        self,
        plan: ExecutionPlan,
        graphs: Mapping[str, GraphModule],
        ops: Mapping[str, dict[str, int]],
        work_dir: Path,
    ) -> dict[str, PieceCallable]:
        """Load or compile every distinct piece. The kernels of one are built while the next is generated.

        Where one fails, the others are kept.
        """
        wanted = [
            _WantedPiece(
                piece=piece, graph=graphs[piece], number=f"{i} of {len(graphs)} distinct pieces",
                fields=piece_fields(piece, ops[piece], self.device), folder=work_dir / f"compile-{piece}",
            )
            for i, piece in enumerate(plan.pieces, 1)
        ]  # fmt: skip
        failure: PieceCompileError | None = None
        begun: list[tuple[_WantedPiece, CompiledPiece | PendingPiece, float]] = []
        for piece in wanted:
            start = time.perf_counter()
            made: CompiledPiece | PendingPiece | None = self._load_piece(piece, work_dir)
            if made is None:
                try:
                    made = start_piece(piece.graph, self.device, piece.folder / KERNELS)
                except PieceCompileError as error:
                    failure = error
                    break
            begun.append((piece, made, time.perf_counter() - start))
        pieces = {}
        for piece, made, seconds in begun:
            start, how = time.perf_counter(), "loaded"
            if isinstance(made, PendingPiece):
                try:
                    made, how = made.result(), "compiled"
                except PieceCompileError as error:
                    failure = failure or error
                    continue
                self._keep(piece, made, work_dir / TRIALS)
            pieces[piece.piece] = made.run
            seconds += time.perf_counter() - start
            if self.dump is not None:
                self.dump.compiled(piece.piece, made.source, how, seconds)
            self._stage("compile", seconds, f"{piece.number} {how}")
        if failure is not None:
            raise failure
        return pieces

    def _load_piece(self, piece: _WantedPiece, work_dir: Path) -> CompiledPiece | None:
        entry = self._get("piece", piece.fields)
        if entry is None:
            return None
        try:
            return _load_entries({piece.piece: entry}, self.device, work_dir)[piece.piece]
        except Exception as error:
            self._do_without(error, entry)
            return None

    def _do_without(self, error: Exception, *entries: Entry) -> None:
        """Have artifacts, one of which does not load although it is whole, made again; what is made takes their place where it is kept."""
        log.warning(
            "Not using the artifact %s: %s cannot be loaded (%s: %s). It is made again.",
            " and ".join(str(entry.path) for entry in entries), "it" if len(entries) == 1 else "one of them", type(error).__name__, error,
        )  # fmt: skip
        log.debug("Where it failed:", exc_info=error)
        self.useless |= {entry.path for entry in entries}

    def _rewrite(
        self, before_measuring: Callable[[], None]
    ) -> tuple[ExecutionPlan, dict[str, GraphModule], list[PassRecord]]:
        """→ the plan, a graph for each distinct piece, what the passes said."""
        start = time.perf_counter()
        captured = capture(
            self.spec.module,
            self.spec.inputs,
            self.spec.state,
            self.dtype,
            quantized=self.spec.quantized_weights,
            with_bytecode=self.dump is not None,
        )
        repeated = f", {captured.regions} repeated blocks" if captured.regions else ""
        self._stage("capture", time.perf_counter() - start, f"{len(captured.gm.graph.nodes)} nodes{repeated}")
        if self.dump is not None:
            self.dump.captured(captured.gm, captured.bytecode)
        start = time.perf_counter()
        tuner = Autotuner(self.device, _tuning_folders(self.config), self.config.forced_passes, before_measuring)
        ctx = PassContext(
            device=self.device, dtype=self.dtype, weights=captured.weights, fake_mode=captured.fake_mode,
            kernels=self.kernels, tuner=tuner,
            quantized_weights=self.spec.quantized_weights,
            tensor_parallel_size=self.config.tensor_parallel_size, tp_plan=self.spec.tp_plan,
        )  # fmt: skip
        verifier = PassVerifier(self.spec.buffers) if self.config.verify_passes else None
        after_pass = self.dump.after_pass if self.dump is not None else lambda name, gm: None
        records = run_passes(captured.gm, self.passes, ctx, self.config.disabled_passes, verifier, after_pass)
        self._stage(
            "passes", time.perf_counter() - start, f"{len(records)} passes, {len(captured.gm.graph.nodes)} nodes"
        )
        start = time.perf_counter()
        stages = split(captured.gm)
        plan, graphs = make_plan(captured.gm, stages, captured.weights, [output.name for output in self.spec.outputs])
        self._stage("split", time.perf_counter() - start, f"{len(stages)} stages, {len(graphs)} distinct pieces")
        if self.dump is not None:
            self.dump.split(plan, graphs)
        return plan, graphs, records

    def _profile(
        self, plan: ExecutionPlan, graphs: Mapping[str, GraphModule], pieces: Mapping[str, PieceCallable]
    ) -> None:
        if self.attention_backends is None:
            raise ValueError("Measuring pieces needs attention backends: give compile_model its attention_backends.")
        start = time.perf_counter()
        try:
            self.report["profile"] = profile_model(
                plan, graphs, pieces, self.spec,
                device=self.device, dtype=self.dtype, kv_cache_dtype=self.kv_cache_dtype,
                backends=self.attention_backends, tokens=self.config.profile_tokens,
            )  # fmt: skip
        except RuntimeError as error:  # of torch, out of memory among them: a measurement is no reason not to serve
            log.warning("The pieces could not be measured: %s", f"{type(error).__name__}: {error}".splitlines()[0])
            return
        self._stage("measure pieces", time.perf_counter() - start, f"at {self.config.profile_tokens} tokens")

    def _facts(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """What a dump says of the model and the environment."""
        toolchain = toolchain_fields(self.device)
        return {
            "model": {
                "architecture": type(self.spec.module).__name__,
                "config": dict(self.spec.config),
                "dtype": str(self.dtype).removeprefix("torch."),
                "layers": sum(len(group.layers) for group in self.spec.state),
            },
            "environment": toolchain,
            "key": {name: value for name, value in fields.items() if name not in toolchain},
            "options": asdict(self.config) | {"kernels": sorted(self.kernels)},
        }

    def _keep(self, piece: _WantedPiece, compiled: CompiledPiece, trials: Path) -> None:
        kernels = piece.folder / KERNELS
        if trials.is_dir():
            shutil.copytree(trials, kernels, dirs_exist_ok=True)
        shutil.rmtree(kernels / "locks", ignore_errors=True)
        self._put("piece", piece.fields, {SOURCE: compiled.source, GRAPH: normalized_text(piece.graph)}, piece.folder)

    def _get(self, kind: str, fields: dict[str, Any]) -> Entry | None:
        for store in self.stores:
            if store.path(kind, fields) not in self.useless and (entry := store.get(kind, fields)):
                return entry
        if self.config.artifact_dir is not None:
            reason = self.stores[0].explain_miss(kind, fields) or f"it holds no {kind}"
            log.warning("The artifact %s does not fit this %s: %s. Compiling.", self.config.artifact_dir, kind, reason)
        return None

    def _put(self, kind: str, fields: dict[str, Any], content: dict[str, str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (folder / name).write_text(text)
        if self.stores:
            store = self.stores[-1]
            # A plan holds what was measured, and is of use with the pieces that belong to it alone.
            replaces = kind == "plan" or store.path(kind, fields) in self.useless
            store.put(kind, fields, folder, replaces=replaces)

    def _stage(self, stage: str, seconds: float, detail: str) -> None:
        self.report["stages"][stage] = round(self.report["stages"].get(stage, 0.0) + seconds, 4)
        self.on_stage(stage, seconds, detail)


def _stores(config: CompileConfig) -> list[ArtifactStore]:
    """Where artifacts are looked for, in order; new ones are kept in the last."""
    if not config.use_cache:
        return []
    stores = [ArtifactStore(config.artifact_dir)] if config.artifact_dir else []
    return [*stores, ArtifactStore(config.cache_dir or default_root())]


def _tuning_folders(config: CompileConfig) -> list[Path]:
    """Where measurements of fused ops are looked for, in order; new ones are kept in the last."""
    if not config.use_cache:
        return []
    folders = [tuning_folder(config.artifact_dir)] if config.artifact_dir else []
    return [*folders, tuning_folder(config.cache_dir)]


def _load_entries(entries: Mapping[str, Entry], device: torch.device, work_dir: Path) -> dict[str, CompiledPiece]:
    for entry in entries.values():
        if (entry.path / KERNELS).is_dir():
            shutil.copytree(entry.path / KERNELS, work_dir / "loaded", copy_function=_copy_new, dirs_exist_ok=True)
    sources = {piece: (entry.path / SOURCE).read_text() for piece, entry in entries.items()}
    return load_pieces(sources, device, work_dir / "loaded")


def _copy_new(source: str, target: str) -> None:
    """Copy a file that is not there yet. Pieces share kernels, named by content: one that is loaded must not be written again."""
    if not os.path.exists(target):
        shutil.copy2(source, target)


def _load_timed(
    entries: Mapping[str, Entry], device: torch.device, work_dir: Path
) -> tuple[dict[str, CompiledPiece], float]:
    start = time.perf_counter()
    return _load_entries(entries, device, work_dir), time.perf_counter() - start


def pass_summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What monitoring needs of the passes, as flat data: sites by pass, and why a pass failed its verification."""
    sites = {row["name"]: {key: row[key] for key in ("matched", "expected")} for row in rows if "matched" in row}
    failed = {row["name"]: row["verification"]["reason"] for row in rows if row.get("verification", {}).get("reason")}
    return {"pass_sites": sites, "failed_passes": failed}


def _pass_row(record: PassRecord) -> dict[str, Any]:
    row: dict[str, Any] = {"name": record.name, "version": record.version, "seconds": round(record.seconds, 4)}
    if record.verification is not None:
        row["verification"] = asdict(record.verification)
    if isinstance(record.result, SkipReason):
        return row | {"skipped": record.result.sentence}
    left_alone = [asdict(miss) for miss in (*record.result.near_misses, *record.result.left_to_inductor)]
    return row | {
        "matched": record.result.matched,
        "expected": record.result.expected,
        "near_misses": left_alone,
        "measured": list(record.result.measured),
    }
