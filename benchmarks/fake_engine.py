"""An engine process without a model: every `STEP_MS` it gives each running request its next token. For benchmarks of the server.

It exchanges the messages of the real engine process. The benchmark replaces that process's entry point by this module's.
"""

from __future__ import annotations

import math
import os
import time
from typing import NoReturn

import zmq

from compile_and_serve.runtime.child_process import exit_at_once, read_bootstrap, set_up_child
from compile_and_serve.runtime.engine.engine_socket import EngineSocket
from compile_and_serve.runtime.engine.heartbeat import HeartbeatSender
from compile_and_serve.runtime.engine.process import Bootstrap
from compile_and_serve.runtime.messages import (
    AbortRequests,
    AddRequest,
    Connect,
    EngineInfo,
    EngineReady,
    EngineStats,
    RequestOutput,
    Shutdown,
    StepOutputs,
)

STEP_MS = "FAKE_ENGINE_STEP_MS"  # environment variables
CORE = "FAKE_ENGINE_CORE"
TOKENS = [2000 + 7 * i for i in range(64)]  # words and parts of words


def main() -> NoReturn:
    """Entry point of the process."""
    bootstrap: Bootstrap = read_bootstrap()
    set_up_child(who="fake engine", log_level=bootstrap.log_level, folder=bootstrap.folder)
    if core := os.environ.get(CORE):
        os.sched_setaffinity(0, {int(core)})
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    clients = EngineSocket(context, bootstrap.folder)
    info = EngineInfo(
        max_model_len=4096, vocab_size=49152, num_kv_blocks=1 << 20, block_size=16, dtype="float32", device="fake", max_running=4096
    )
    HeartbeatSender(context, bootstrap.folder).start()
    step_seconds = float(os.environ[STEP_MS]) / 1000
    running: dict[str, list[int]] = {}  # id → tokens so far, tokens in all
    next_step = time.monotonic()
    while True:
        wait = max(0.0, next_step - time.monotonic()) if running else 1.0
        while clients.wait(math.ceil(wait * 1000)):
            for client, message in clients.arrived():
                if isinstance(message, Connect):
                    clients.connect(client)
                    clients.send(client, EngineReady(info=info))
                elif isinstance(message, AddRequest):
                    request = message.request
                    clients.own(client, request.request_ids)
                    for one in request.request_ids:
                        running[one] = [0, request.sampling_params.max_tokens or 1]
                elif isinstance(message, AbortRequests):
                    for one in clients.disown(client, message.request_ids):
                        del running[one]
                elif isinstance(message, Shutdown):
                    exit_at_once(0)
            wait = max(0.0, next_step - time.monotonic())
        if not running or time.monotonic() < next_step:
            continue
        next_step = max(next_step + step_seconds, time.monotonic())
        step: list[RequestOutput] = []
        for one, state in list(running.items()):
            output = RequestOutput(request_id=one, new_token_ids=[TOKENS[state[0] % len(TOKENS)]])
            state[0] += 1
            if state[0] == state[1]:
                output.finish_reason = "length"
                del running[one]
            step.append(output)
        stats = EngineStats(num_running=len(running), step_tokens=len(step))
        clients.send_step(StepOutputs(outputs=step, stats=stats))
