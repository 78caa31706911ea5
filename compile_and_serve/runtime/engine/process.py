"""The engine core as a process of its own, reached over ZMQ.

The process starts as `runtime/child_process.py` describes, with a `Bootstrap`. It exchanges the messages of `runtime/messages.py` with
any number of clients (`EngineSocket`). A single thread receives, steps and sends. Sending only hands the bytes to ZMQ's thread, and
with async scheduling the device works on the next step meanwhile. A second thread sends heartbeats.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from compile_and_serve.runtime.child_process import (
    EXIT_FAILURE,
    boot_code,
    describe_error,
    exit_at_once,
    freeze_heap,
    read_bootstrap,
    set_up_child,
)
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.engine.engine_socket import Client, EngineSocket
from compile_and_serve.runtime.engine.heartbeat import HeartbeatSender
from compile_and_serve.runtime.engine.intake import Intake
from compile_and_serve.runtime.logs import LogFormat
from compile_and_serve.runtime.messages import (
    AbortRequests,
    AddRequest,
    Connect,
    EngineDead,
    EngineReady,
    EngineStage,
    RequestOutput,
    Shutdown,
    StepOutputs,
    ToEngine,
    UtilityCall,
    UtilityOptions,
    UtilityResult,
)

logger = logging.getLogger(__name__)

BOOT_CODE = boot_code("compile_and_serve.runtime.engine.process")
_IDLE_POLL_MS = 1000
_LOADING_POLL_MS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bootstrap:
    """What the child needs to start.

    folder: where the sockets lie. log_level: of `compile_and_serve`. log_format: of this process.
    """

    config: EngineConfig
    folder: str
    log_level: int
    log_format: LogFormat = "text"


class EngineProcess:
    """An `EngineCore` behind an `EngineSocket`."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        config = bootstrap.config
        self._config = replace(config, compile=replace(config.compile, work_dir=Path(bootstrap.folder)))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._heartbeat = HeartbeatSender(context, bootstrap.folder)
        self._socket = EngineSocket(context, bootstrap.folder)
        self._intake = Intake(self._add)
        self._ready: EngineReady | None = None
        self._has_unreported_abort = False  # since the last stats were sent
        self._sent_pending_work: dict[str, int] = {}  # of `EngineStats`, as sent last
        self._shutdown: Shutdown | None = None
        self._sleep_calls: list[tuple[Client, UtilityCall]] = []  # to sleep, once no request is left, and what came behind it
        self._loads: list[tuple[Client, int, Future[None]]] = []  # of adapters or ranks, with the number of the call that waits

    def run(self) -> int:
        """Build the engine and serve until told to stop. Returns the process's exit status."""
        self._socket.wait()  # for the process that started this one, which wants to know of the stages
        self._receive()
        try:
            from compile_and_serve.runtime.engine.core import EngineCore

            self._core = EngineCore(self._config, on_stage=self._report_stage)
        except Exception as error:
            return self._die("The engine could not start", error)
        freeze_heap()
        self._ready = EngineReady(info=self._core.info)
        self._socket.send_all(self._ready)
        self._heartbeat.start()
        try:
            self._serve()
        except Exception as error:
            return self._die("The engine failed while it computed a step", error)
        finally:
            self._core.shutdown()
        return 0

    def _serve(self) -> None:
        elastic = self._core.elastic
        while True:
            try:
                return self._serve_with_ranks()
            except RankFailedError as error:
                if elastic is None:
                    raise
                self._tell(elastic.fail(error))
                elastic.restart()

    def _serve_with_ranks(self) -> None:
        core = self._core
        while True:
            self._heartbeat.begin_turn()
            if self._loads:
                self._answer_loads()
            has_work = core.has_work() or bool(self._intake)
            if self._shutdown is not None and not has_work:
                return
            if self._sleep_calls and not has_work:
                calls, self._sleep_calls = self._sleep_calls, []
                for client, call in calls:
                    self._answer(client, call)
            if has_work or self._idle() or self._wait():
                self._receive()
                if self._intake:
                    self._intake.take(core.unfinished_keys)
            if self._shutdown is not None and not self._shutdown.drain:
                self._abort_all()
                return
            if core.has_work():
                outputs = core.step()
            elif self._has_unreported_abort:
                outputs = StepOutputs(stats=core.stats())
            else:
                continue
            self._has_unreported_abort = False
            self._tell(outputs)

    def _wait(self) -> bool:
        with self._heartbeat.waiting():
            return self._socket.wait(_LOADING_POLL_MS if self._loads else _IDLE_POLL_MS)

    def _idle(self) -> bool:
        did_work = self._core.idle()
        stats = self._core.stats()
        if stats.pending_work != self._sent_pending_work:
            self._tell(StepOutputs(stats=stats))
        return did_work

    def _tell(self, outputs: StepOutputs) -> None:
        if outputs.stats is not None:
            self._sent_pending_work = outputs.stats.pending_work
        if orphans := self._socket.send_step(outputs):
            self._core.abort(orphans)
            self._has_unreported_abort = True

    def _receive(self) -> None:
        """Handle the messages that have arrived."""
        for client, message in self._socket.arrived():
            self._handle(client, message)

    def _handle(self, client: Client, message: ToEngine) -> None:
        if isinstance(message, Connect):
            self._socket.connect(client)
            if self._ready is not None:
                self._socket.send(client, self._ready)
        elif not self._socket.is_connected(client):
            return  # its last words
        elif isinstance(message, AddRequest):
            self._intake.put(client, message)
        elif isinstance(message, AbortRequests):
            self._intake.drop(client, message.request_ids)
            self._core.abort(self._socket.disown(client, message.request_ids))
            self._has_unreported_abort = True
        else:
            self._intake.take_all()
            if isinstance(message, UtilityCall):
                self._call(client, message)
            else:
                self._shutdown = message

    def _add(self, client: Client, message: AddRequest) -> None:
        if not self._socket.is_connected(client):
            return  # it has gone meanwhile
        from compile_and_serve.runtime.scheduler.request_checks import QueueFullError, TenantLimitError

        request, answer = message.request, UtilityResult(call_id=message.call_id)
        output = RequestOutput(request_id=request.request_id, finish_reason="error")  # of each sequence
        try:
            if self._shutdown is not None:
                raise QueueFullError("The server is shutting down and takes no new requests.")
            self._core.add_request(request)
            self._socket.own(client, request.request_ids)
        except QueueFullError as error:
            answer.error = output.error = str(error)
            output.error_kind = "limited" if isinstance(error, TenantLimitError) else "overloaded"
            answer.value = {"limited": isinstance(error, TenantLimitError)}
        except ValueError as error:
            output.error, output.error_kind = str(error), "invalid"
        except Exception:
            # One bad request must not end the others.
            logger.exception("Adding request %s failed.", request.request_id)
            output.error, output.error_kind = "The engine failed on this request; see its log for details.", "internal"
        if message.call_id:
            self._socket.send(client, answer)
        if output.error is not None and not (message.call_id and answer.error is not None):
            outputs = [msgspec.structs.replace(output, request_id=request_id) for request_id in request.request_ids]
            self._socket.send(client, StepOutputs(outputs=outputs))

    def _call(self, client: Client, call: UtilityCall) -> None:
        if call.method == "sleep" and self._core.has_work():
            self._core.refuse_requests("The engine is going to sleep.")
            if call.options.get("mode") == "abort":
                self._abort_all()
            self._sleep_calls.append((client, call))  # `_serve` answers once the requests that came before have ended
        elif call.method == "wake_up" and self._sleep_calls:
            self._sleep_calls.append((client, call))  # in order, or the engine would sleep after it
        else:
            self._answer(client, call)

    def _answer(self, client: Client, call: UtilityCall) -> None:
        result = UtilityResult(call_id=call.call_id)
        try:
            if call.method == "load_adapter" and call.adapter is not None:
                self._loads.append((client, call.call_id, self._core.load_adapter(call.adapter)))
                return
            if call.method == "scale_elastic_ep":
                self._loads.append((client, call.call_id, self._scale(call.options)))
                return
            result.value = self._core.utility(call.method, call.adapter, call.options)
        except ValueError as error:
            result.error = str(error)
        self._socket.send(client, result)

    def _scale(self, options: UtilityOptions) -> Future[None]:
        if self._core.elastic is None:
            raise ValueError("The number of ranks is fixed: start the server with --enable-elastic-ep.")
        return self._core.elastic.scale(options.get("new_data_parallel_size"))

    def _answer_loads(self) -> None:
        """Answer the calls whose adapters every rank has read, or one could not read."""
        if self._core.elastic is not None:
            self._core.elastic.poll()
        self._core.poll_adapters()
        for client, call_id, load in self._loads:
            if load.done():
                error = load.exception()
                self._socket.send(client, UtilityResult(call_id=call_id, error=None if error is None else str(error)))
                self._ready = EngineReady(info=self._core.info)  # for those who connect later
        self._loads = [entry for entry in self._loads if not entry[2].done()]

    def _abort_all(self) -> None:
        self._socket.send_step(StepOutputs(outputs=self._core.abort_all(), stats=self._core.stats()))

    def _report_stage(self, stage: str, seconds: float, detail: str) -> None:
        self._socket.send_all(EngineStage(stage=stage, seconds=seconds, detail=detail))

    def _die(self, what: str, error: Exception) -> int:
        """Tell the clients the reason. A user error is passed on as it is; others get a stack trace in the log."""
        if isinstance(error, (ValueError, RankFailedError)):
            reason = str(error)
            logger.debug("%s", what, exc_info=error)
        else:
            reason = f"{what}: {describe_error(error)}"
            logger.error("%s.", what, exc_info=error)
        self._socket.send_all(EngineDead(reason=reason))
        return EXIT_FAILURE

    def close(self) -> None:
        """Close the sockets. Queued messages have LINGER_MS to be sent."""
        self._heartbeat.close()
        self._socket.close()
        zmq.Context.instance().term()


def main() -> NoReturn:
    """Entry point of the engine process."""
    bootstrap: Bootstrap = read_bootstrap()
    parallel = bootstrap.config.parallel
    who = f"replica {parallel.data_parallel_rank}" if parallel.data_parallel_size > 1 else ""
    set_up_child(who=who, log_level=bootstrap.log_level, folder=bootstrap.folder, log_format=bootstrap.log_format)
    process = EngineProcess(bootstrap)
    status = process.run()
    process.close()
    exit_at_once(status)
