"""`--dump-dir`: every stage of a compilation, as files that can be read and run.

    00_dynamo_bytecode.py                   the bytecode that Dynamo generated for the model's forward, decompiled
    01_captured.py                          the captured graph
    02_pass_functionalize.py …              the graph after each pass
    90_split/piece_0_<fingerprint>.py       each distinct piece
    91_compiled/piece_0_<fingerprint>.py    the code that Inductor generated for it, with its kernels
    92_forward.py                           the function that calls the pieces
    report.json                             all of this as data, with the pass report (schema: `compiler/reports/dump_format.py`)

An error while dumping is logged and ends the dump, not the compilation.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import Any, ParamSpec

import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler.pieces.fingerprint import fingerprint
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, OpStep, PieceStep
from compile_and_serve.compiler.pieces.plan_function import plan_source
from compile_and_serve.compiler.pieces.splitter import Piece, split
from compile_and_serve.compiler.reports.dump_format import BYTECODE, COMPILED, FORWARD, REPORT, SCHEMA, SPLIT
from compile_and_serve.compiler.reports.graph_text import GraphText, SymbolNames, source_of, target_name
from compile_and_serve.custom_ops.weight_functions import expression_to_json

log = logging.getLogger(__name__)

P = ParamSpec("P")


def _logs_errors(method: Callable[P, None]) -> Callable[P, None]:
    """The method does nothing once the dump has failed. An error in it is logged and ends the dump."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        dump = args[0]
        assert isinstance(dump, Dump)
        if dump.failed:
            return
        try:
            method(*args, **kwargs)
        except Exception as error:
            dump.failed = True
            log.warning("The dump to %s is incomplete (%s: %s).", dump.folder, type(error).__name__, error)
            log.debug("The dump failed here:", exc_info=True)

    return guarded


class Dump:
    """The dump of one compilation. The pipeline calls the methods in this order; `report` becomes report.json."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.folder, self.failed = folder, False
        self.report: dict[str, Any] = {"schema": SCHEMA, **facts, "graphs": [], "pieces": {}, "split": []}
        self._symbols = SymbolNames({})
        self._prepare()

    @_logs_errors
    def _prepare(self) -> None:
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / REPORT).is_file():
            raise FileExistsError("the folder is not empty and does not contain a dump")
        for old in (*self.folder.glob("[0-9][0-9]_*"), self.folder / REPORT):
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        (self.folder / SPLIT).mkdir(parents=True)
        (self.folder / COMPILED).mkdir()
        # Marks the folder as a dump from the start, so that the next dump may replace one that was interrupted.
        (self.folder / REPORT).write_text(json.dumps({"schema": SCHEMA, "incomplete": True}))

    @_logs_errors
    def captured(self, gm: GraphModule, bytecode: Sequence[CodeType]) -> None:
        """Write the captured graph and Dynamo's bytecode."""
        self._symbols = SymbolNames.of(gm)
        (self.folder / BYTECODE).write_text(_decompiled(bytecode))
        self.graph("captured", gm)

    @_logs_errors
    def graph(self, name: str, gm: GraphModule, *, kind: str = "captured") -> None:
        """Write a graph of the whole model: the captured one, or, with kind "pass", the graph after pass `name`."""
        file = f"{len(self.report['graphs']) + 1:02}_{'pass_' if kind == 'pass' else ''}{name}.py"
        nodes = sum(node.op not in ("placeholder", "output") for node in gm.graph.nodes)
        description = f"The whole model after pass {name}" if kind == "pass" else "The whole model as Dynamo captured it"
        text = GraphText(gm, self._symbols).file(title=file.removesuffix(".py"), description=f"{description}: {nodes} calls.", file=file)
        (self.folder / file).write_text(text)
        self.report["graphs"].append({"name": name, "kind": kind, "file": file, "nodes": nodes, "steps": self._steps(gm)})

    def after_pass(self, name: str, gm: GraphModule) -> None:
        """Write the graph after a pass."""
        self.graph(name, gm, kind="pass")

    @_logs_errors
    def split(self, plan: ExecutionPlan, graphs: Mapping[str, GraphModule]) -> None:
        """Write the distinct pieces, and the function that calls them."""
        counts = Counter(step.piece for step in plan.steps if isinstance(step, PieceStep))
        for i, (piece, gm) in enumerate(graphs.items()):
            file = f"{SPLIT}/piece_{i}_{piece[:8]}.py"
            description = f"Distinct piece {i}, used {counts[piece]} times; fingerprint {piece}."
            text = GraphText(gm, self._symbols).file(title=f"piece {i}", description=description, file=file)
            (self.folder / file).write_text(text)
            self.report["split"].append({"piece": piece, "count": counts[piece], "file": file})
        steps = [step.op if isinstance(step, OpStep) else f"piece {plan.pieces.index(step.piece)}" for step in plan.steps]
        weights = {
            t.target: {
                "expression": expression_to_json(t.expression),
                "dtype": str(t.spec.dtype).removeprefix("torch."),
                "shape": t.spec.shape,
            }
            for t in plan.transforms
        }
        self.report |= {"steps": steps, "weights": weights, "weight_bytes": _weight_bytes(plan)}
        head = "\n".join(f"# piece_{i}: {SPLIT}/piece_{i}_{piece[:8]}.py" for i, piece in enumerate(plan.pieces))
        (self.folder / FORWARD).write_text(f"{head}\n\n{plan_source(plan)}")

    @_logs_errors
    def compiled(self, piece: str, source: str, how: str, seconds: float) -> None:
        """Write the code that Inductor generated for a piece. how: "compiled" or "loaded"."""
        row = next(row for row in self.report["split"] if row["piece"] == piece)
        file = row["file"].replace(SPLIT, COMPILED)
        row |= {"compiled_file": file, "how": how, "seconds": round(seconds, 4)}
        (self.folder / file).write_text(source)

    @_logs_errors
    def finish(self, report: Mapping[str, Any]) -> None:
        """Write report.json, which contains the compilation's report."""
        self.report |= {"compilation": {k: v for k, v in report.items() if k != "profile"}, "profile": report.get("profile")}
        write_report(self.folder, self.report)
        log.info("The compilation was dumped to %s.", self.folder)

    def _steps(self, gm: GraphModule) -> list[dict[str, Any]]:
        """The pieces and split ops of a whole graph. Pieces are given by fingerprint; the report holds the nodes of each once."""
        steps: list[dict[str, Any]] = []
        text = GraphText(gm, self._symbols)
        for stage in split(gm):
            if isinstance(stage, Piece):
                key = fingerprint(stage.gm)
                if key not in self.report["pieces"]:
                    self.report["pieces"][key] = self._piece(stage)
                steps.append({"piece": key})
            else:
                steps.append({"op": target_name(stage.node), "node": self._node(stage.node, text)})
        return steps

    def _piece(self, piece: Piece) -> dict[str, Any]:
        text = GraphText(piece.gm, self._symbols)
        nodes = [self._node(node, text) for node in piece.gm.graph.nodes if node.op != "output"]
        outputs = [text.argument(value) for value in next(iter(reversed(piece.gm.graph.nodes))).args[0]]
        return {"nodes": nodes, "outputs": outputs, "text": text.function()}

    def _node(self, node: Node, text: GraphText) -> dict[str, Any]:
        row: dict[str, Any] = {"name": text.name(node), "value": self._symbols.value(node.meta.get("example_value"))}
        if node.op == "placeholder":
            kind = "weight" if "weight" in node.meta else "input"
            return row | {"kind": kind, "label": node.meta.get("weight") or node.meta.get("input") or node.name}
        source = source_of(node)
        inputs = [text.name(read) for read in node.all_input_nodes]
        row |= {"kind": "call", "target": target_name(node), "call": text.call(node), "inputs": inputs}
        return row | ({"source": source.place, "code": source.code} if source.place else {})


def add_to_report(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Add facts that are known only after the compilation (memory, captured graphs) to a dump's report. An error is logged."""
    try:
        report = json.loads((folder / REPORT).read_text())
        write_report(folder, report | {name: facts})
    except (OSError, ValueError) as error:
        log.warning("The dump in %s could not be completed: %s", folder, error)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json. Infinity and NaN, which JSON lacks, become null."""
    (folder / REPORT).write_text(json.dumps(_plain(report), indent=1, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _decompiled(bytecode: Sequence[CodeType]) -> str:
    """Source of Dynamo's bytecode, or its disassembly if depyf cannot decompile it."""
    import dis
    import io

    parts = []
    for code in bytecode:
        try:
            from depyf import decompile

            parts.append(f"# {code.co_filename}:{code.co_firstlineno}\n{decompile(code)}")
        except Exception as error:
            log.info("depyf cannot decompile Dynamo's bytecode of %s (%s); dumping the disassembly.", code.co_name, error)
            listing = io.StringIO()
            dis.dis(code, file=listing)
            parts.append("\n".join(f"# {line}" for line in listing.getvalue().splitlines()) + "\n")
    return "\n\n".join(parts)


def _weight_bytes(plan: ExecutionPlan) -> int:
    return sum(torch.Size(t.spec.shape).numel() * t.spec.dtype.itemsize for t in plan.transforms)
