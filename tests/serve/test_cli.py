"""The command line: flags, output and exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx
import pytest
import typer.main
from typer.testing import CliRunner

from compile_and_serve.option_fields import parse_counts, parse_size
from compile_and_serve.serve.cli.api_keys import API_KEY_VARIABLE, read_api_keys
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.cli.output import FAILURE, INTERRUPTED, USER_ERROR, StageDisplay, _ConsoleHandler, run_command

ENGINE_FLAGS = {
    "--revision",
    "--tokenizer", "--dtype", "--max-model-len", "--model-impl", "--load-format", "--seed", "--block-size", "--num-gpu-blocks-override",
    "--kv-cache-dtype", "--kv-cache-memory", "--kv-cache-memory-bytes", "--gpu-memory-utilization", "--enable-prefix-caching",
    "--state-dtype",
    "--no-enable-prefix-caching", "--max-num-seqs", "--max-num-batched-tokens", "--max-encoder-tokens", "--scheduling-policy",
    "--async-scheduling", "--no-async-scheduling", "--max-waiting",
    "--request-ledger", "--no-request-ledger", "--verify-state", "--enforce-eager", "--eager", "--disable-pass", "--force-pass",
    "--pass", "--quantization", "-q", "--quantization-exclude",
    "--verify-passes", "--profile-pieces", "--dump-dir", "--cudagraph-mode", "--cudagraph-capture-sizes", "--capture",
    "--cache-dir", "--artifact", "--no-cache", "--tensor-parallel-size", "-tp",
    "--kv-offloading-size", "--kv-offload-dir", "--kv-offload-dir-size", "--pipeline-parallel-size", "-pp", "--enable-expert-parallel",
    "-ep", "--enable-eplb", "--eplb-config", "--num-redundant-experts", "--enable-elastic-ep",
    "--pipeline-parallel-layers", "--data-parallel-size", "-dp", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port",
    "--master-key-file",
    "--distributed-executor-backend", "--disable-custom-all-reduce", "--device", "--attention-backend", "--num-threads", "--verbose", "-v",
    "--enable-lora", "--max-loras", "--max-lora-rank", "--lora-experts", "--max-cpu-loras", "--runner", "--pooling-type", "--max-logprobs",
    "--logprobs-mode", "--kv-transfer-config",
    "--speculative-config", "--kv-events-config", "--expert-metrics", "--hf-overrides", "--download-dir", "--merge-lora",
    "--trust-remote-code", "--mm-processor-kwargs", "--limit-mm-per-prompt", "--enable-mm-embeds",
    "--max-audio-seconds", "--allowed-media-domains",
}  # fmt: skip

# Removing or renaming a flag breaks users' scripts: change this list only on purpose.
FLAGS = {
    "serve": ENGINE_FLAGS | {
        "model", "--host", "--port", "--served-model-name", "--api-key", "--api-key-file", "--allowed-origins", "--root-path",
        "--chat-template", "--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser", "--escape-special-tokens",
        "--no-escape-special-tokens", "--repetition-detection",
        "--response-role", "--response-store", "--response-store-seconds", "--return-tokens-as-token-ids", "--shutdown-timeout",
        "--access-log", "--profile-dir", "--override-generation-config", "--enable-tokenizer-info-endpoint",
        "--no-access-log", "--enable-graphs", "--max-body-size", "--max-audio-size", "--enable-prompt-tokens-details",
        "--lora-modules", "--lora-dir", "--config", "--admin-api-key", "--admin-api-key-file", "--enable-admin-routes", "--uds",
        "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--ssl-require-client-cert", "--ssl-ciphers", "--request-timeout",
        "--chat-template-content-format", "--default-chat-template-kwargs", "--reasoning-effort-map", "--generation-config",
        "--open-schemas", "--enable-force-include-usage", "--disable-fastapi-docs", "--metrics-prefix",
        "--stream-keepalive", "--api-server-count", "--headless", "--data-parallel-multi-port-external-lb", "-dpm",
        "--data-parallel-supervisor-port",
        "--dp-supervisor-probe-interval-s", "--dp-supervisor-probe-timeout-s", "--dp-supervisor-probe-failure-threshold",
        "--log-format", "--throughput-log", "--otlp-traces-endpoint",
        "--allow-lora-without-admin-key", "--allowed-hosts", "--tenants", "--fair-by-user", "--max-background-responses",
    },
    "compile": ENGINE_FLAGS | {"model", "--output"},
    "generate": ENGINE_FLAGS | {
        "model", "prompts", "--prompts-file", "--raw", "--system", "--max-tokens", "--temperature", "--top-p",
        "--top-k", "--stop", "--json",
    },
    "inspect": {"dump", "other", "--text", "--output", "-o", "--host", "--port", "--verbose", "-v"},
    "models": {"--verbose", "-v"},
    "quantize": {
        "model", "--output", "-o", "--scheme", "--calibration", "--num-samples", "--device", "--num-threads", "--verbose", "-v",
    },
    "route": {"--prefill", "--decode", "--prefill-events", "--block-size", "--host", "--port", "--verbose", "-v"},
    "bench latency": ENGINE_FLAGS | {
        "model", "--input-len", "--output-len", "--batch-size", "--num-iters", "--num-iters-warmup", "--output-json",
    },
    "bench throughput": ENGINE_FLAGS | {
        "model", "--num-prompts", "--input-len", "--output-len", "--n", "--random-range-ratio", "--output-json",
    },
    "cache ls": {"--cache-dir", "--kv-offload-dir"},
    "cache verify": {"--cache-dir"},
    "cache prune": {"--older-than", "--all", "--cache-dir", "--kv-offload-dir"},
    "bench serve": {
        "--base-url", "--model", "--endpoint", "--num-prompts", "--turns", "--request-rate", "--max-concurrency", "--input-len",
        "--output-len", "--random-range-ratio", "--num-clients", "--ignore-eos", "--no-ignore-eos", "--api-key", "--seed", "--timeout",
        "--output-json", "--verbose", "-v",
    },
}  # fmt: skip

ROOT = Path(__file__).parents[2]
SMALL_ENGINE = ["--eager", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--num-threads", "1"]


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    """Restores the loggers: commands set up logging for the process, which the tests share."""
    loggers = [logging.getLogger(name) for name in (None, "compile_and_serve", "benchmarks")]
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the command line, in this process."""
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    return result.exit_code, result.stdout, result.stderr


def test_models_lists_architectures_with_features() -> None:
    status, out, _ = run("models")
    lines = dict(line.split(None, 1) for line in out.splitlines())
    assert status == 0
    assert lines["LlamaForCausalLM"] == "full attention"
    assert lines["Gemma3ForCausalLM"] == "full attention, sliding windows"
    assert lines["MixtralForCausalLM"] == "full attention, experts"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        for sub_name, sub in getattr(command, "commands", {"": command}).items():
            found[f"{name} {sub_name}".strip()] = sub
    return found


def test_flags_are_frozen() -> None:
    found = {
        name: {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for name, command in commands().items()
    }
    assert found == FLAGS


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    "module",
    [
        "compile_and_serve.serve.cli.main",
        "compile_and_serve.serve.server",
        "compile_and_serve.runtime.options",
        "compile_and_serve.runtime.weights.resolve",
        "compile_and_serve.runtime.engine.core",  # also runs beside ranks in processes of their own
    ],
)
def test_processes_without_a_model_do_not_import_torch(module: str) -> None:
    """Importing torch would delay the start of the next process: the engine's, or its ranks'."""
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", FLAGS)
def test_help_explains_every_command(name: str) -> None:
    code, out, _ = run(*name.split(), "--help")
    assert code == 0
    assert commands()[name].help.splitlines()[0][:40] in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("2k", 2000), ("2KiB", 2048), ("512MiB", 512 << 20), ("1.5GiB", 3 << 29), ("2G", 2 * 10**9), ("1 GB", 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "2x", "-1", "1e9", "2TiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="A size must be like 2G, 512MiB"):
        parse_size(text)


def test_counts() -> None:
    assert parse_counts("1,2,16") == [1, 2, 16]
    with pytest.raises(ValueError, match="numbers separated by commas, got '1,x'"):
        parse_counts("1,x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "no-such-model"], "'no-such-model' was not found: expected a model folder, a .gguf file"),
        (["generate", "no-such-model", "Hi"], "'no-such-model' was not found"),
        (["compile", "no-such-model"], "'no-such-model' was not found"),
        (["compile", "smollm2-135m", "--eager"], "--enforce-eager runs the model uncompiled"),
        (["compile", "smollm2-135m", "--no-cache"], "--no-cache would discard the compiled model"),
        (["compile", "smollm2-135m", "--output", __file__], "is not a folder: give a new folder"),
        (["compile", "smollm2-135m", "--output", "a", "--cache-dir", "b"], "--output and --cache-dir both name"),
        (["serve", "smollm2-135m", "--port", "70000"], "port must be in [0, 65535], got 70000"),
        (["serve", "smollm2-135m", "--api-key", ""], "api_keys must not contain an empty key"),
        (["serve", "smollm2-135m", "--response-role", ""], "response_role must not be empty"),
        (["serve", "smollm2-135m", "--shutdown-timeout", "-5"], "shutdown_timeout must be at least 0 seconds"),
        (["serve", "smollm2-135m", "--shutdown-timeout", "nan"], "shutdown_timeout must be at least 0 seconds"),
        (["generate", "smollm2-135m", "Hi", "--temperature", "-3"], "temperature must be in [0, 1000000], got -3.0"),
        (["generate", "smollm2-135m", "Hi", "--prompts-file", "x"], "both as arguments and with --prompts-file"),
        (["generate", "smollm2-135m", "--prompts-file", "/nowhere.txt"], "--prompts-file /nowhere.txt cannot be read"),
        (["generate", "smollm2-135m", "Hi", "--kv-cache-memory", "2x"], "A size must be like 2G"),
        (["generate", "smollm2-135m"], "all lines of the input are empty"),
        (["bench", "latency", "smollm2-135m", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["bench", "throughput", "smollm2-135m", "--random-range-ratio", "1"], "must be in [0, 1), got 1.0"),
        (["bench", "serve", "--endpoint", "chats"], "--endpoint must be completions or chat, got 'chats'"),
        (["bench", "serve", "--request-rate", "0"], "--request-rate must be positive, got 0.0"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == USER_ERROR
    assert out == ""
    assert err.startswith("Error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "x", "--dtype", "int4"], "'int4' is not one of 'auto', 'bfloat16', 'float16', 'float32'"),
        (["serve", "x", "--port", "web"], "'--port'"),
        (["serve"], "Missing argument"),
        (["serve", "x", "--no-such-flag"], "No such option"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_a_malformed_command_line_is_status_2(arguments: list[str], message: str) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())


def test_a_failure_is_status_1_with_a_traceback_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("the device failed\non its second line")

    def interrupt() -> None:
        raise KeyboardInterrupt

    for verbose, action, status in ((False, fail, FAILURE), (True, fail, FAILURE), (False, interrupt, INTERRUPTED)):
        with pytest.raises(typer.Exit) as error:
            run_command(action, verbose=verbose)
        assert error.value.exit_code == status
        err = capsys.readouterr().err
        assert ("Traceback" in err) is verbose
        if action is fail:
            assert "Error: RuntimeError: the device failed" in err
            assert ("--verbose shows the traceback" in err) is not verbose


def truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remove_architecture(folder: Path) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["architectures"], config["model_type"]
    file.write_text(json.dumps(config))


def change_width(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 160}))


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_weights, "model.safetensors is truncated or not a safetensors file"),
        (remove_architecture, "names no architecture"),
        (change_width, "mlp.down_proj.weight in"),
        (remove_tokenizer, "tokenizer"),
    ],
)
def test_a_damaged_model_is_one_sentence_and_status_2(
    damage: Callable[[Path], None], message: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    damage(folder)
    code, out, err = run("generate", str(folder), "the one", *SMALL_ENGINE)
    errors = [line for line in err.splitlines() if line.startswith("Error: ")]
    assert (code, out, len(errors)) == (USER_ERROR, "", 1), err
    assert message in errors[0]
    assert err.splitlines()[-1] == errors[0]


def test_api_keys_come_from_flags_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  zwölf \none\n")
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert read_api_keys(None, None) == ()
    assert read_api_keys(["flag"], file) == ("flag", "one", "zwölf")
    monkeypatch.setenv(API_KEY_VARIABLE, "from the environment")
    assert read_api_keys(None, None) == ("from the environment",)
    assert read_api_keys(["flag"], None) == ("flag",)
    assert read_api_keys(None, file) == ("one", "zwölf")
    assert not caplog.records
    monkeypatch.setenv(API_KEY_VARIABLE, " , ")
    assert read_api_keys(None, None) == ()
    assert [record.getMessage() for record in caplog.records] == [
        f"The environment variable {API_KEY_VARIABLE} contains no key, so it is ignored."
    ]
    file.write_text("\n")
    for path, message in ((file, "contains no key"), (tmp_path / "missing", "cannot be read")):
        with pytest.raises(ValueError, match=message):
            read_api_keys(None, path)


def test_help_says_where_a_pass_imports_from() -> None:
    out = " ".join(run("serve", "--help")[1].replace("│", " ").split())
    assert "compile_and_serve.compiler" in out


def test_log_lines_contain_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("serve", logging.WARNING, "", 0, "a client sent %s", ("\x1b[2J\r\x9b1m\u00e9",), None)
    _ConsoleHandler().handle(record)
    assert capsys.readouterr().err == "Warning: a client sent \\x1b[2J\\x0d\\x9b1mé\n"


def test_stages_are_lines_with_times(capsys: pytest.CaptureFixture[str]) -> None:
    with StageDisplay() as stages:
        stages("capture", 1.234, "1473 nodes")
        stages("warm up", 12.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split() == ["✓", "capture", "1.23", "s", "1473", "nodes"]
    assert lines[1].split() == ["✓", "warm", "up", "12.00", "s"]


def without_reader() -> TextIO:
    read_end, write_end = os.pipe()
    os.close(read_end)
    return open(write_end, "w", buffering=1)


def on_a_full_disk() -> TextIO:
    return open("/dev/full", "w", buffering=1)


@pytest.mark.parametrize("make_stream", [without_reader, on_a_full_disk])
def test_log_lines_that_cannot_be_written_are_dropped(make_stream: Callable[[], TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        for _ in range(2):
            _ConsoleHandler().handle(logging.LogRecord("serve", logging.INFO, "", 0, "a request", (), None))
        if make_stream is without_reader:
            with StageDisplay() as stages:
                stages("capture", 1.0)
    with contextlib.suppress(OSError):
        stream.close()


def test_generate_answers_in_the_order_of_the_prompts(tiny_llama_dir: Path) -> None:
    arguments = ["generate", str(tiny_llama_dir), "--json", "--max-tokens", "6", *SMALL_ENGINE]
    code, out, err = run(*arguments, "the one", "another")
    assert code == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["the one", "another"]
    assert all(0 < row["completion_tokens"] <= 6 for row in rows)
    assert all(row["finish_reason"] in ("stop", "length") for row in rows)
    assert "read" in err
    assert "load" in err
    # the same prompts from standard input
    again = run(*arguments, stdin="the one\n\nanother\n")
    assert [json.loads(line) for line in again[1].splitlines()] == rows
    # without the chat template there are fewer prompt tokens, and the text follows the prompt
    raw = run(*arguments[:2], "--raw", "--max-tokens", "6", *SMALL_ENGINE, "the one")
    assert raw[0] == 0
    assert raw[1].startswith("the one")


@pytest.mark.slow
def test_compiled_ahead_of_time(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """`compile` needs no weights. A start with its artifact skips capture and compilation and answers like the eager model."""
    config_only, artifact = tmp_path / "config-only", tmp_path / "artifact"
    config_only.mkdir()
    shutil.copy(tiny_llama_dir / "config.json", config_only)
    engine = ["--dtype", "float32", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4", "--num-threads", "1"]
    code, _, err = run("compile", str(config_only), "--output", str(artifact), *engine)
    assert code == 0, err
    assert "distinct" in err
    assert "merge_linears" in err
    generate = ["generate", str(tiny_llama_dir), "the one", "--max-tokens", "8", *engine]
    code, compiled, err = run(*generate, "--artifact", str(artifact), "--cache-dir", str(tmp_path / "unused"))
    assert code == 0, err
    assert "load artifact" in err
    assert "capture" not in err
    assert run(*generate, "--eager")[1] == compiled


def test_serve_from_start_to_signal(tiny_llama_dir: Path) -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "compile_and_serve.serve.cli",
        "serve",
        str(tiny_llama_dir),
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
    ]
    process = subprocess.Popen([*command, *SMALL_ENGINE], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"})
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "ready after" in line:
                break
        assert any(f"Serving tiny on http://127.0.0.1:{port}" in line for line in lines), "".join(lines)
        body = {"model": "tiny", "prompt": "the one", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] >= 1
        # a second server on the same port exits at once with one sentence
        second = subprocess.run([*command, *SMALL_ENGINE], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert second.returncode == USER_ERROR
        assert f"Port {port} on 127.0.0.1 is in use" in second.stderr
        assert "Traceback" not in second.stderr
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 0, rest
    finally:
        process.kill()
        process.wait()
