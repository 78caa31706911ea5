"""`compile_model`: from a plain module to a callable.

key → artifact in a store? → load the plan and its pieces
                   no      → capture → passes → split → compile each distinct piece → store
→ stitch the pieces together
"""

from __future__ import annotations

import inspect
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compile_and_serve.compiler.artifacts.autotune import Autotuner
from compile_and_serve.compiler.artifacts.cache_key import op_versions, plan_fields, toolchain_fields
from compile_and_serve.compiler.artifacts.model_artifacts import KERNELS, ModelArtifacts, OpVersions, StoredPlan
from compile_and_serve.compiler.artifacts.store import Entry, key_of
from compile_and_serve.compiler.artifacts.work_folder import WorkFolder
from compile_and_serve.compiler.capture.capture import CapturedGraph, CaptureError, capture
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.inductor import CompiledPiece, PendingPiece, PieceCallable, PieceCompileError, start_inductor, start_piece
from compile_and_serve.compiler.model import CompiledModel, EagerModel, JoinPieces, Model, ModelSource, StageCallback
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.quantize_linears import slow_reason
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, PieceStep, make_plan, with_weights_of
from compile_and_serve.compiler.pieces.splitter import split
from compile_and_serve.compiler.pieces.stages import choose_stages
from compile_and_serve.compiler.reports.dump import Dump
from compile_and_serve.compiler.reports.pass_report import log_stored_rows, pass_row, pass_summary
from compile_and_serve.compiler.reports.profile import profile_model
from compile_and_serve.compiler.rewrite.graph_pass import GraphPass, PassContext, PassError
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.user_passes import with_user_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier, key_orders
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import StepInput, declarations_by_name
from compile_and_serve.garbage import no_garbage_collection

log = logging.getLogger(__name__)

WORK_PREFIX = "compile-and-serve-"
# Folders in the work folder: the kernels of loaded pieces, and Inductor's tests of instruction sets.
LOADED, PROBES = "loaded", "probes"


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
    state_dtype: torch.dtype | None = None,
    stage: int | None = None,
    stage_seconds: Mapping[str, float] | None = None,
    on_stage: StageCallback = _ignore_stage,
) -> Model:
    """Compile a model for one device, or wrap it in mode "eager". The caller then loads the weights into the result.

    kernels: names of the `cas` ops that have a kernel here, from `available_kernels`. Passes that need another op skip themselves.
    passes: replace `default_passes()`; `config.user_passes` are added to them.
    attention_backends, kv_cache_dtype: used to measure the split ops for `config.profile_tokens`, and for nothing else. Backends
        are given by state group; the dtype is `dtype` by default.
    state_dtype: of recurrent state that passes add; None: their choice.
    stage: the result is this stage of `config.pipeline_parallel_size`; None: the whole model. The artifact is always the whole model's.
    stage_seconds: of the steps of plans, as in `choose_stages`.
    on_stage: called with (stage, seconds, detail) when a stage ends.
    Raises `CaptureError`, `SplitError`, `PassError`, `PieceCompileError` or `StagesError`.
    """
    _check_optional(spec)
    if config.mode == "eager":
        _check_eager(config)
        return EagerModel(spec=spec, device=device, report={"mode": "eager"})
    if config.quantization is not None and any(one.is_quantized for one in spec.quantized_weights.values()):
        raise PassError(
            f"The checkpoint is already quantized, so it cannot be quantized to {config.quantization}: leave out --quantization."
        )
    all_passes = with_user_passes(passes or default_passes(config), config.user_passes)
    names = [graph_pass.name for graph_pass in all_passes]
    # Checked before the artifacts: the key of one that exists may not contain the unknown name.
    for verb, wanted in (("force", config.forced_passes), ("disable", config.disabled_passes)):
        if unknown := wanted - set(names):
            raise PassError(f"Cannot {verb} unknown pass {sorted(unknown)[0]!r}: the passes are {', '.join(names)}.")
    return _Compilation(
        spec=spec,
        config=config,
        device=device,
        dtype=dtype,
        kernels=kernels,
        passes=all_passes,
        on_stage=on_stage,
        attention_backends=attention_backends,
        kv_cache_dtype=kv_cache_dtype or dtype,
        artifacts=ModelArtifacts(config, device),
        added=_added(spec, all_passes, config.disabled_passes, state_dtype),
        stage=stage,
        stage_seconds=stage_seconds,
    ).run()


def _added(
    spec: ModelSource, passes: Sequence[GraphPass], disabled: frozenset[str], state_dtype: torch.dtype | None
) -> tuple[StepInput | StateGroup, ...]:
    """The inputs and state that passes may add to a step. Raises `PassError` for a name that is taken."""
    taken = {one.name for one in spec.inputs} | {group.name for group in spec.state}
    added: dict[str, StepInput | StateGroup] = {}
    for graph_pass in passes:
        for one in () if graph_pass.name in disabled else graph_pass.adds(spec):
            if one.name in taken or added.setdefault(one.name, one) != one:
                raise PassError(f"Pass {graph_pass.name} adds {one.name!r} to the step, which has another of this name.")
    if state_dtype is None:
        return tuple(added.values())
    return tuple(one.with_state_dtype(state_dtype) if isinstance(one, StateGroup) else one for one in added.values())


def _check_optional(spec: ModelSource) -> None:
    """Raise `CaptureError` if `forward` cannot do without one of the model's optional inputs."""
    parameters = inspect.signature(spec.module.forward).parameters
    for one in spec.inputs:
        if one.optional and (one.name not in parameters or parameters[one.name].default is not None):
            raise CaptureError(f"The model's input {one.name} is optional: its forward must take {one.name}=None, and do without it then.")


def _check_eager(config: CompileConfig) -> None:
    """Raise `PassError` for options that need a compiled model."""
    if config.mesh.tensor > 1:
        raise PassError(
            f"An eager model cannot be sharded over {config.mesh.tensor} ranks: leave out --enforce-eager, or use a "
            "tensor parallel size of 1."
        )
    if config.quantization is not None:
        raise PassError("An eager model cannot be quantized: leave out --quantization or --enforce-eager.")
    if config.disabled_passes or config.forced_passes:
        raise PassError("An eager model goes through no passes: leave out --disable-pass and --force-pass, or --enforce-eager.")


@dataclass(kw_only=True, slots=True)
class _Compilation:
    spec: ModelSource
    config: CompileConfig
    device: torch.device
    dtype: torch.dtype
    kernels: frozenset[str]
    passes: tuple[GraphPass, ...]
    on_stage: StageCallback
    attention_backends: Mapping[str, AttentionBackend] | None
    kv_cache_dtype: torch.dtype
    artifacts: ModelArtifacts
    added: tuple[StepInput | StateGroup, ...]  # what the passes may add to a step
    stage: int | None
    stage_seconds: Mapping[str, float] | None
    report: dict[str, Any] = field(default_factory=lambda: {"mode": "compile", "stages": {}})
    dump: Dump | None = None

    def run(self) -> CompiledModel:
        key_fields = self._key_fields()
        if self.config.dump_dir is not None:
            self.dump = Dump(self.config.dump_dir, self._facts(key_fields))
        # Loaded pieces use files in a folder of this process, so that no other process can change them.
        work_dir = WorkFolder(WORK_PREFIX, self.config.work_dir)
        plan, plain, join_pieces = self._load_or_build(key_fields, Path(work_dir.name))
        self.report |= pass_summary(self.report["passes"])
        self.report["pieces"] = len([step for step in plan.steps if isinstance(step, PieceStep)])
        self.report["distinct_pieces"] = len(plan.pieces)
        if plain is not None:
            self.report["pieces_of_plain_plan"] = len(set(plain.pieces) - set(plan.pieces))
        if self.dump is not None:
            self.dump.finish(self.report)
        inputs, state = self._step_of(plan)
        model = CompiledModel(
            spec=self.spec,
            inputs=inputs,
            state=state,
            plan=plan,
            plain_plan=plain,
            join_pieces=join_pieces,
            device=self.device,
            report=self.report,
            work_dir=work_dir,
        )
        return model if self.stage is None else self._stage_of(model, self.stage)

    def _stage_of(self, model: CompiledModel, index: int) -> CompiledModel:
        """The model's part that a stage runs."""
        config = self.config
        size, layers = config.pipeline_parallel_size, config.pipeline_parallel_layers
        stages = choose_stages(model.plan, model.plain_plan, model.state, size, layers, self.stage_seconds)
        ours, plain = stages.stage(model.plan, model.plain_plan, index)
        plans = [one.plan for one in (ours, plain) if one is not None]
        received = dict.fromkeys((*ours.received, *(() if plain is None else plain.received)))
        self.report["stage"], self.report["stage_cuts"] = index, ", ".join(stages.layers)
        self.report["stage_cuts_by"] = stages.by
        part = replace(
            model,
            inputs=(*model.inputs, *received),
            state=stages.held(*plans),
            plan=ours.plan,
            plain_plan=None if plain is None else plain.plan,
            is_last_stage=index == config.pipeline_parallel_size - 1,
            whole_transforms=model.plan.transforms,
        )
        return replace(part, sources_of_others=frozenset(model.source_specs.keys() - part.source_specs.keys()))

    def _step_of(self, plan: ExecutionPlan) -> tuple[tuple[StepInput, ...], tuple[StateGroup, ...]]:
        """Inputs and state of a plan's step: the model's own, and those added ones that the plan reads."""
        read = set(plan.arguments)
        inputs = tuple(one for one in self.added if isinstance(one, StepInput) and one.name in read)
        groups = (one for one in self.added if isinstance(one, StateGroup))
        state = tuple(group for group in groups if not read.isdisjoint(group.tensor_names))
        return (*self.spec.inputs, *inputs), (*self.spec.state, *state)

    def _key_fields(self) -> dict[str, Any]:
        """Everything that the plan depends on."""
        fields = plan_fields(self.spec, self.passes, self.config.disabled_passes, self.kernels, self.device, self.dtype, self.config.mesh)
        if self.config.forced_passes:
            fields["forced_passes"] = sorted(self.config.forced_passes)
        if self.config.verify_passes:  # verification may leave out a pass, and its errors are part of the report
            fields["verified"] = True
        # This loads the kernels of quantized linears, which decide the layout of packed weights: before any piece is loaded.
        slow = slow_reason(self.config.quantization, self.spec.quantized_weights, self.device, self.dtype)
        if slow is not None:
            fields["slow_quantized_linears"] = True
            self.report["slow_quantized_linears"] = slow
        return fields

    def _load_or_build(self, key_fields: dict[str, Any], work_dir: Path) -> tuple[ExecutionPlan, ExecutionPlan | None, JoinPieces]:
        """The plan, that of steps without optional inputs, and a function that returns their pieces by fingerprint."""
        # Dumps and profiles need the graphs, which artifacts do not contain.
        use_artifacts = self.dump is None and not self.config.profile_tokens
        if use_artifacts and (loaded := self._load(key_fields, work_dir)):
            return loaded
        with self.artifacts.lock(key_fields):
            # Another process may have built it while this one waited for the lock.
            if use_artifacts and (loaded := self._load(key_fields, work_dir)):
                return loaded
            stored, pieces = self._build(key_fields, work_dir)
            return stored.plan, stored.plain, lambda: pieces

    def _load(self, key_fields: dict[str, Any], work_dir: Path) -> tuple[ExecutionPlan, ExecutionPlan | None, JoinPieces] | None:
        """The whole model from artifacts, or None if a part is missing.

        The pieces are loaded by a thread, while the caller reads the weights.
        """
        found = self.artifacts.find_plan(key_fields)
        if found is None:
            return None
        plan_entry, stored = found
        entries: dict[str, Entry] = {}
        for piece in stored.pieces:
            entry = self.artifacts.find_piece(piece, stored.op_versions)
            if entry is None:
                return None
            entries[piece] = entry
        self.report |= {"passes": stored.passes, "artifact": "hit", "artifact_key": plan_entry.key}
        log_stored_rows(stored.passes)

        def load() -> tuple[dict[str, CompiledPiece], float]:
            start = time.perf_counter()
            return self.artifacts.load(entries, work_dir / LOADED), time.perf_counter() - start

        threads = ThreadPoolExecutor(1, thread_name_prefix="load-pieces")
        loading = threads.submit(load)
        threads.shutdown(wait=False)

        def join() -> Mapping[str, PieceCallable]:
            try:
                pieces, seconds = loading.result()
            except Exception as error:
                self.artifacts.reject(error, *entries.values())
                made, rebuilt = self._build(key_fields, work_dir)
                if (made.plan, made.plain) != (stored.plan, stored.plain):  # the weights were read for the stored plan
                    raise PieceCompileError(
                        f"The artifact {plan_entry.path} cannot be loaded ({type(error).__name__}: {error}). It was rebuilt with other "
                        "measured choices, which the weights that were just read do not fit: start again to use it."
                    ) from error
                return rebuilt
            detail = f"{len(pieces)} pieces, while the weights were read, from {plan_entry.path}"
            self._stage("load artifact", seconds, detail)
            return {piece: compiled.run for piece, compiled in pieces.items()}

        return stored.plan, stored.plain, join

    def _build(self, key_fields: dict[str, Any], work_dir: Path) -> tuple[StoredPlan, dict[str, PieceCallable]]:
        """Capture, rewrite, split and compile the model, and store the artifacts. → the plans, and their pieces by fingerprint"""
        start = time.perf_counter()
        with start_inductor(self.device, work_dir / PROBES) as wait:
            importing = time.perf_counter() - start
            with no_garbage_collection():
                plan, plain, graphs, records = self._plan(wait)
            start = time.perf_counter()
            wait()
            self._stage("compile", importing + time.perf_counter() - start, "Inductor is imported")
            versions = {piece: op_versions(gm) for piece, gm in graphs.items()}
            rows = [pass_row(record) for record in records]
            stored = StoredPlan(plan=plan, plain=plain, op_versions=versions, passes=rows)
            pieces = self._compile_pieces(stored.pieces, graphs, versions, work_dir)
        self.report |= {"passes": rows, "artifact": "made", "artifact_key": key_of(key_fields)}
        if self.dump is None or self.artifacts.find_plan(key_fields) is None:
            self.artifacts.write_plan(key_fields, stored, work_dir / "plan")
        if self.config.profile_tokens:
            self._profile(plan, graphs, pieces)
        return stored, pieces

    def _plan(
        self, before_measuring: Callable[[], None]
    ) -> tuple[ExecutionPlan, ExecutionPlan | None, dict[str, GraphModule], list[PassRecord]]:
        """Capture, rewrite and split. → the plan, that of steps without optional inputs, a graph for each distinct piece, and what the
        passes did
        """
        start = time.perf_counter()
        captured = self._capture(self.spec.inputs, with_bytecode=self.dump is not None)
        gm = captured.gm
        required = [one for one in self.spec.inputs if not one.optional]
        without = self._capture(required) if len(required) < len(self.spec.inputs) else None
        repeated = f", {captured.regions} repeated blocks" if captured.regions else ""
        self._stage("capture", time.perf_counter() - start, f"{len(gm.graph.nodes)} nodes{repeated}")
        if self.dump is not None:
            self.dump.captured(gm, captured.bytecode)

        start = time.perf_counter()
        tuner = Autotuner(self.device, self.artifacts.tuning_folders, self.config.forced_passes, before_measuring)
        disabled = self.config.disabled_passes
        for_optional = [i for i, one in enumerate(self.passes) if one.for_optional and one.name not in disabled]
        shared = for_optional[0] if for_optional else len(self.passes)
        ctx = PassContext(
            device=self.device,
            dtype=self.dtype,
            weights=captured.weights,
            fake_mode=captured.fake_mode,
            kernels=self.kernels,
            tuner=tuner,
            mesh=self.config.mesh,
            tp_plan=self.spec.tp_plan,
            declared=declarations_by_name(
                (*self.spec.inputs, *(one for one in self.added if isinstance(one, StepInput))),
                (*self.spec.state, *(one for one in self.added if isinstance(one, StateGroup))),
            ),
        )
        verifier = PassVerifier(self.spec.buffers) if self.config.verify_passes else None
        plain = None
        if without is not None:  # the model has optional inputs of its own
            plain = without.gm, ctx.of_other(without.weights, without.fake_mode), copy(verifier)
            run_passes(plain[0], [one for one in self.passes if not one.for_optional], plain[1], disabled, plain[2])
        after_pass = self.dump.after_pass if self.dump is not None else lambda name, gm: None
        records = run_passes(gm, self.passes[:shared], ctx, disabled, verifier, after_pass)
        if for_optional and plain is None:
            plain = (*ctx.fork(gm), copy(verifier))
            rest = [one for one in self.passes[shared:] if not one.for_optional]
            run_passes(plain[0], rest, plain[1], disabled, plain[2])
        records += run_passes(gm, self.passes[shared:], ctx, disabled, verifier, after_pass)
        assert plain is None or key_orders(gm) == key_orders(plain[0]), "both plans read one KV cache"
        self._stage("passes", time.perf_counter() - start, f"{len(records)} passes, {len(gm.graph.nodes)} nodes")

        start = time.perf_counter()
        stages = split(gm)
        outputs = [output.name for output in self.spec.outputs]
        plan, graphs = make_plan(gm, stages, ctx.weights, outputs, self.spec.inputs)
        if self.dump is not None:
            self.dump.split(plan, graphs)
        plain_plan = None
        if plain is not None:
            plain_plan, plain_graphs = make_plan(plain[0], split(plain[0]), plain[1].weights, outputs, self.spec.inputs)
            plan, graphs = with_weights_of(plan, plain_plan), plain_graphs | graphs
        self._stage("split", time.perf_counter() - start, f"{len(stages)} stages, {len(graphs)} distinct pieces")
        return plan, plain_plan, graphs, records

    def _capture(self, inputs: Sequence[StepInput], *, with_bytecode: bool = False) -> CapturedGraph:
        spec = self.spec
        return capture(spec.module, inputs, spec.state, self.dtype, quantized=spec.quantized_weights, with_bytecode=with_bytecode)

    def _compile_pieces(
        self, distinct: Sequence[str], graphs: Mapping[str, GraphModule], versions: OpVersions, work_dir: Path
    ) -> dict[str, PieceCallable]:
        """Load or compile the distinct pieces, given by their fingerprints. While the kernels of one are built, the next one is generated.

        If one fails, the others are still stored.
        """
        failure: PieceCompileError | None = None
        started: dict[str, tuple[CompiledPiece | PendingPiece, float]] = {}
        for piece in distinct:
            start = time.perf_counter()
            try:
                begun = self._load_piece(piece, versions, work_dir) or start_piece(
                    graphs[piece], self.device, _folder(work_dir, piece) / KERNELS
                )
            except PieceCompileError as error:
                failure = error
                break
            started[piece] = begun, time.perf_counter() - start
        pieces: dict[str, PieceCallable] = {}
        for number, (piece, (begun, seconds)) in enumerate(started.items(), 1):
            start = time.perf_counter()
            if isinstance(begun, CompiledPiece):
                compiled, how = begun, "loaded"
            else:
                try:
                    compiled, how = begun.result(), "compiled"
                except PieceCompileError as error:
                    failure = failure or error
                    continue
                self._write_piece(piece, versions, compiled, graphs[piece], work_dir)
            pieces[piece] = compiled.run
            seconds += time.perf_counter() - start
            if self.dump is not None:
                self.dump.compiled(piece, compiled.source, how, seconds)
            self._stage("compile", seconds, f"{number} of {len(graphs)} distinct pieces {how}")
        if failure is not None:
            raise failure
        return pieces

    def _load_piece(self, piece: str, versions: OpVersions, work_dir: Path) -> CompiledPiece | None:
        """A piece from its artifact; None if there is none that can be loaded."""
        entry = self.artifacts.find_piece(piece, versions)
        if entry is None:
            return None
        try:
            return self.artifacts.load({piece: entry}, work_dir / LOADED)[piece]
        except Exception as error:
            self.artifacts.reject(error, entry)
            return None

    def _write_piece(self, piece: str, versions: OpVersions, compiled: CompiledPiece, graph: GraphModule, work_dir: Path) -> None:
        folder = _folder(work_dir, piece)
        if (work_dir / PROBES).is_dir():
            # Stored beside the kernels, so that loading the piece does not build them again.
            shutil.copytree(work_dir / PROBES, folder / KERNELS, dirs_exist_ok=True)
        self.artifacts.write_piece(piece, versions, compiled, graph, folder)

    def _profile(self, plan: ExecutionPlan, graphs: Mapping[str, GraphModule], pieces: Mapping[str, PieceCallable]) -> None:
        if self.attention_backends is None:
            raise ValueError("Profiling needs attention backends: give compile_model its attention_backends.")
        start = time.perf_counter()
        inputs, state = self._step_of(plan)
        try:
            self.report["profile"] = profile_model(
                plan,
                graphs,
                pieces,
                inputs,
                state,
                device=self.device,
                dtype=self.dtype,
                kv_cache_dtype=self.kv_cache_dtype,
                backends=self.attention_backends,
                tokens=self.config.profile_tokens,
            )
        except RuntimeError as error:  # raised by torch, for example out of memory; the model can still be served
            log.warning("The pieces could not be measured: %s", f"{type(error).__name__}: {error}".splitlines()[0])
            return
        self._stage("measure pieces", time.perf_counter() - start, f"at {self.config.profile_tokens} tokens")

    def _facts(self, key_fields: Mapping[str, Any]) -> dict[str, Any]:
        """Facts about the model and the environment, for the dump."""
        toolchain = toolchain_fields(self.device)
        return {
            "model": {
                "architecture": type(self.spec.module).__name__,
                "config": dict(self.spec.config),
                "dtype": str(self.dtype).removeprefix("torch."),
                "layers": sum(len(group.layers) for group in self.spec.state),
            },
            "environment": toolchain,
            "key": {name: value for name, value in key_fields.items() if name not in toolchain},
            "options": asdict(self.config) | {"kernels": sorted(self.kernels)},
        }

    def _stage(self, stage: str, seconds: float, detail: str) -> None:
        self.report["stages"][stage] = round(self.report["stages"].get(stage, 0.0) + seconds, 4)
        self.on_stage(stage, seconds, detail)


def _folder(work_dir: Path, piece: str) -> Path:
    """Where a piece is compiled."""
    return work_dir / f"compile-{piece}"
