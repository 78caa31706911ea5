"""Command lines that were written for vLLM: its flags are read from its source, each has an outcome, and its grammar is understood."""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import compile_and_serve.serve.server as server_module
from compile_and_serve.option_fields import parse_count
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.cli.vllm.arguments import OwnFlags, translate
from compile_and_serve.serve.cli.vllm.catalogue import FLAGS_FILE, VllmFlag, catalogue
from compile_and_serve.serve.cli.vllm.decisions import DECISIONS, SAME
from compile_and_serve.serve.cli.vllm.read_flags import read_flags
from compile_and_serve.serve.cli.vllm.table import DOCUMENT, make_table
from compile_and_serve.serve.settings import ServerSettings

COMMAND: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
OWN = OwnFlags.of(COMMAND.params)
SMALL = ["--enforce-eager", "--num-gpu-blocks-override", "64", "--max-num-seqs", "4"]


def translated(line: str) -> list[str]:
    """Our arguments for a command line in which nothing is ignored or refused."""
    found = translate(line.split(), OWN)
    assert (found.ignored, found.refused) == ([], [])
    return found.arguments


Serve = Callable[..., tuple[EngineConfig, ServerSettings, str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tiny_llama_dir: Path) -> Iterator[Serve]:
    """Runs `serve` up to the start of the server: what the server would get, and the log."""
    loggers = [logging.getLogger(name) for name in (None, "compile_and_serve", "benchmarks")]  # the command sets them up for the process
    before = [(logger.level, logger.handlers[:]) for logger in loggers]
    seen: list[tuple[EngineConfig, ServerSettings]] = []

    def run(config: EngineConfig, settings: ServerSettings, **callbacks: Any) -> int:
        seen.append((config, settings))
        return 0

    monkeypatch.setattr(server_module, "run", run)

    def start(*arguments: str, with_model: bool = True) -> tuple[EngineConfig, ServerSettings, str]:
        model = [str(tiny_llama_dir)] if with_model else []
        result = CliRunner().invoke(app, ["serve", *model, *arguments])
        assert result.exit_code == 0, result.output + result.stderr
        return *seen[-1], result.stderr

    yield start
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


# --- the flags


def test_every_flag_has_one_outcome() -> None:
    names = {spelling for flag in catalogue().flags for spelling in flag.spellings}
    assert DECISIONS.keys() <= names
    assert catalogue().version == "0.33.0"
    assert len(catalogue().flags) > 340
    assert len({flag.name for flag in catalogue().flags}) == len(catalogue().flags)
    for flag in catalogue().flags:
        is_ours = bool(OWN.spellings.intersection(flag.spellings))
        decision = DECISIONS.get(flag.name, SAME)
        assert is_ours or decision is not SAME, f"{flag.name} has no outcome"
        if is_ours:
            assert decision.outcome in ("same", "mapped"), flag.name
        if decision is not SAME:
            assert decision.text
            assert not decision.text.endswith(".")


def test_the_table_in_the_docs_is_the_scripts() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == make_table(catalogue())


SAMPLES = {"switch": [], "optional": [], "text": ["x"], "int": ["2"], "float": ["0.5"], "values": ["a", "b"], "json": ["{}"]}
SPECIAL = {
    "--model": ["m"],
    "--override-generation-config": ['{"temperature": 0.5}'],
    "--device": ["cpu"],
    "--dtype": ["half"],
    "--runner": ["pooling"],
    "--load-format": ["safetensors"],
    "--model-impl": ["vllm"],
    "--kv-cache-dtype": ["fp8_e4m3"],
    "--distributed-executor-backend": ["uni"],
    "--logprobs-mode": ["raw_logits"],
    "--scheduling-policy": ["priority"],
    "--chat-template-content-format": ["openai"],
    "--rope-scaling": ['{"factor": 2}'],
    "--max-lora-rank": ["8"],
    "--cudagraph-capture-sizes": ["1", "2"],
    "--cuda-graph-sizes": ["1", "2"],
    "--config": [],
}


@pytest.mark.parametrize("flag", catalogue().flags, ids=lambda flag: flag.name)
def test_every_flag_is_parsed(flag: VllmFlag) -> None:
    """Each spelling, with a value, becomes arguments that our own parser takes, unless the flag is refused."""
    if flag.name == "--config":
        return
    values = SPECIAL.get(flag.name, SAMPLES[flag.kind])
    outcome = DECISIONS.get(flag.name, SAME).outcome
    for spelling in (*flag.spellings, *flag.off):
        found = translate(["m", spelling, *values] if flag.name != "--model" else [spelling, *values], OWN)
        options, rest, _ = COMMAND.make_parser(typer.Context(COMMAND)).parse_args(args=list(found.arguments))
        assert (options.get("model"), rest) == ("m", []), (spelling, found.arguments)
        assert (found.refused != []) <= (outcome == "refused"), found.refused
        assert (found.ignored != []) <= (outcome == "ignored"), found.ignored
        assert all(sentence.endswith(".") and sentence.count("\n") == 0 for sentence in (*found.refused, *found.ignored))


@pytest.mark.parametrize("flag", [flag for flag in catalogue().flags if flag.default is not None], ids=lambda flag: flag.name)
def test_vllms_defaults_say_nothing(flag: VllmFlag) -> None:
    """A script that spells out a default asks for what happens anyway."""
    if DECISIONS.get(flag.name, SAME).outcome not in ("ignored", "refused") or flag.kind == "values" or not flag.default:
        return
    if flag.kind == "switch":
        words = [flag.name] if flag.default == "True" else [*flag.off[:1]]
    else:
        words = [flag.name, flag.default]
    found = translate(["m", *words], OWN)
    assert found.arguments == ["m"]
    assert (found.refused, found.ignored) == ([], [])


# --- the grammar


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # several values after one flag, and where the model is
        ("m --served-model-name a b", "m --served-model-name a --served-model-name b"),
        ("m --api-key a b --port 1", "m --api-key a --api-key b --port 1"),
        ("--served-model-name a m", "--served-model-name a m"),
        ("--served-model-name a b m", "--served-model-name a --served-model-name b m"),
        ("--served-model-name a b --port 1 m", "--served-model-name a --served-model-name b --port 1 m"),
        ("--model m --served-model-name a b", "m --served-model-name a --served-model-name b"),
        ("--model=m --port=1", "m --port 1"),
        ("m --lora-modules a=x b=y", "m --lora-modules a=x --lora-modules b=y"),
        ('m --lora-modules {"name":"a","path":"x"} b=y', 'm --lora-modules {"name":"a","path":"x"} --lora-modules b=y'),
        ("m --cudagraph-capture-sizes 1 2 4", "m --cudagraph-capture-sizes 1,2,4"),
        ("m --cudagraph-capture-sizes 1,2,4", "m --cudagraph-capture-sizes 1,2,4"),
        # names
        ("m --max_model_len 1k --served_model_name=a_b", "m --max-model-len 1k --served-model-name a_b"),
        ("m --hf_overrides.rope_theta 1e6", 'm --hf-overrides {"rope_theta": 1000000.0}'),
        ("m -tp 2 -dp 2 -asc 2 -q fp8", "m -tp 2 -dp 2 --api-server-count 2 -q fp8"),
        ("m --device-memory-utilization 0.5", "m --gpu-memory-utilization 0.5"),
        ("m --seed -1", "m --seed -1"),
        # switches
        ("m --no-enable-prefix-caching", "m --no-enable-prefix-caching"),
        ("m --disable-prefix-caching", "m --no-enable-prefix-caching"),
        ("m --enable-prefix-caching=false --enforce-eager=true", "m --no-enable-prefix-caching --enforce-eager"),
        ("m --no-enforce-eager --no-enable-lora --disable-lora", "m"),
        ("m --enable-prefix-caching=maybe", "m --enable-prefix-caching=maybe"),
        # JSON
        (
            "m --hf-overrides.rope_parameters.factor 4 --hf-overrides.rope_parameters.rope_type=yarn",
            'm --hf-overrides {"rope_parameters": {"factor": 4, "rope_type": "yarn"}}',
        ),
        ("m --hf-overrides.a+ x,y --hf-overrides.a+=z --hf-overrides.b 32K", 'm --hf-overrides {"a": ["x", "y", "z"], "b": 32768}'),
        ('m --rope-scaling {"factor":2} --rope-theta 1e4', 'm --hf-overrides {"rope_scaling": {"factor": 2}, "rope_theta": 10000.0}'),
        ("m -sc.method ngram -sc.num_speculative_tokens 4", 'm --speculative-config {"method": "ngram", "num_speculative_tokens": 4}'),
        ("m --spec-method ngram --spec-tokens 4", 'm --speculative-config {"method": "ngram", "num_speculative_tokens": 4}'),
        (
            "m --speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 3",
            'm --speculative-config {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
        ),
        ('m --allowed-origins ["a","b"]', "m --allowed-origins a --allowed-origins b"),
        ("m --allowed-origins *", "m --allowed-origins *"),
        # other words and other names
        ("m --dtype half", "m --dtype float16"),
        ("m --dtype bfloat16", "m --dtype bfloat16"),
        ("m --kv-cache-dtype fp8_e4m3", "m --kv-cache-dtype fp8"),
        ("m --attention-backend FLASHINFER", "m --attention-backend flashinfer"),
        ("m --task embed", "m --runner pooling"),
        ("m --task generate", "m --runner generate"),
        ('m --pooler-config {"pooling_type":"MEAN"}', "m --pooling-type mean"),
        ("m --convert embed", "m --runner pooling"),
        ("m --reasoning-parser none", "m"),
        ("m --reasoning-parser qwen3", "m --reasoning-parser qwen3"),
        ('m --structured-outputs-config {"reasoning_parser":"qwen3"}', "m --reasoning-parser qwen3"),
        ("m --max-num-queued-reqs 9 --sse-keep-alive-interval 5", "m --max-waiting 9 --stream-keepalive 5"),
        ("m --ssl-cert-reqs 2", "m --ssl-require-client-cert"),
        ("m --ssl-cert-reqs 0", "m"),
        ("m --disable-log-stats --disable-uvicorn-access-log", "m --throughput-log=0 --no-access-log"),
        ("m --uvicorn-log-level debug", "m --verbose"),
        ("m --uvicorn-log-level warning", "m"),
        # the compiler
        ("m -O0", "m --enforce-eager"),
        ("m -O 3", "m"),
        ("m -O=2", "m"),
        ('m --compilation-config {"cudagraph_capture_sizes":[1,8]}', "m --cudagraph-capture-sizes 1,8"),
        ("m -cc.cudagraph_mode FULL_DECODE_ONLY", "m --cudagraph-mode full"),
        ("m --compilation-config 3", "m"),
        # what is asked for happens anyway
        ("m --enable-chunked-prefill --nnodes 1 --cpu-offload-gb 0 --tokenizer-mode auto --disable-log-requests", "m --nnodes 1"),
        # words of nobody are left to our own parser
        ("m --no-such-flag 1", "m --no-such-flag 1"),
        ("m --pass a_b:C_d -- --x_y", "m --pass a_b:C_d -- --x_y"),
    ],
)
def test_arguments_are_translated(line: str, expected: str) -> None:
    assert " ".join(translated(line)) == expected


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("m --no-enable-chunked-prefill", "--no-enable-chunked-prefill is not supported: prompts are always read in chunks"),
        ("m --disable-chunked-prefill", "--disable-chunked-prefill is not supported"),
        ("m --cpu-offload-gb 4", "--cpu-offload-gb 4 is not supported: weights stay on the device."),
        ("m --hf-overrides.a 1 --rope-scaling {", "--rope-scaling must be JSON ("),
        ('m --pooler-config {"pooling_type":"ALL"}', "the pooling_type 'all' is not supported"),
        ('m --structured-outputs-config {"enable_in_reasoning":true}', "a grammar begins after the reasoning"),
        ("m --compilation-config [1]", "--compilation-config must be a JSON object"),
        ("m --tokenizer-mode mistral", "--tokenizer-mode mistral is not supported"),
        ("m --kv-cache-dtype-skip-layers 0 1", "all layers keep the KV cache in one dtype"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence(line: str, sentence: str) -> None:
    found = translate(line.split(), OWN)
    assert len(found.refused) == 1
    assert sentence in found.refused[0]
    result = CliRunner().invoke(app, ["serve", *line.split()])
    assert result.exit_code == 2
    assert result.stderr == f"Error: {found.refused[0]}\n"


def test_flags_without_effect_are_named_with_the_reason() -> None:
    line = "m --code-revision main --swap-space 4 --mm-processor-cache-gb 2 --compilation-config.custom_ops+ none"
    found = translate(line.split(), OWN)
    assert found.arguments == ["m"]
    assert found.refused == []
    assert found.ignored == [
        "--code-revision has no effect: the code of a model is that of --revision.",
        "--swap-space has no effect: preempted sequences are computed again, not swapped.",
        "--mm-processor-cache-gb has no effect: threads of the server prepare images, videos and audio, "
        "and each rank runs the encoder whole.",
        "--compilation-config.custom_ops has no effect: the compiler is another; see --pass and --force-pass.",
    ]


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("1k", 1000), ("1K", 1024), ("32K", 32768), ("25.6k", 25600), ("1m", 10**6), ("2G", 2**31), (" 8 ", 8), ("-1", -1)],
)
def test_counts_have_units(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "1.5K", "1.5", "1e3", "1kk", "x"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(ValueError, match="A number must be like 4096, 32k"):
        parse_count(text)


# --- the command


def test_a_command_line_of_vllm_starts_the_server(serve: Serve) -> None:
    line = (
        "--host 0.0.0.0 --port 8001 --served-model-name a b --max-model-len 1k --max_num_batched_tokens 2K --gpu-memory-utilization 0.9 "
        "--dtype float --enable-chunked-prefill --trust-remote-code --tool-call-parser hermes --enable-auto-tool-choice "
        "--reasoning-parser deepseek_r1 --generation-config vllm --chat-template-content-format string "
        '--default-chat-template-kwargs {"enable_thinking":false} --enable-force-include-usage --disable-log-requests '
        '--disable-log-stats --hf-overrides.max_position_embeddings 4096 --allowed-origins ["*"] --enable-lora '
        '--lora-modules a1=/x {"name":"a2","path":"/y","base_model_name":"m"} --compilation-config {"cudagraph_capture_sizes":[4,1]}'
    )
    config, settings, log = serve(*line.split(), "--num-gpu-blocks-override", "64")
    assert settings.served_model_names == ("a", "b")
    assert (settings.host, settings.port, settings.generation_config, settings.throughput_log) == ("0.0.0.0", 8001, "vllm", 0)
    assert settings.lora_modules == (("a1", Path("/x")), ("a2", Path("/y")))
    assert settings.default_chat_template_kwargs == {"enable_thinking": False}
    assert (settings.chat_template_content_format, settings.force_include_usage) == ("string", True)
    assert settings.allowed_origins == ("*",)
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (1000, 2048)
    assert (config.model.dtype, config.model.hf_overrides) == ("float32", {"max_position_embeddings": 4096})
    assert config.compile.capture_sizes == (1, 4)
    assert config.model.trust_remote_code
    assert log == ""


@pytest.mark.parametrize("length", ["auto", "-1", "AUTO"])
def test_the_length_may_be_the_models_own(serve: Serve, length: str) -> None:
    assert serve("--max-model-len", length, *SMALL)[0].model.max_model_len is None


def test_a_config_file_of_vllm_starts_the_server(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "served-model-name: [a, b]\nmax-model-len: 2k\nenable-chunked-prefill: true\ndtype: half\nallowed-origins: ['*']\n"
        "compilation-config:\n  mode: 0\n  cudagraph_capture_sizes: [1, 2]\nhf-overrides:\n  rope_theta: 1000000\n"
        "swap-space: 4\ndisable_log_stats: true\nenable-prefix-caching: false\n"
    )
    config, settings, log = serve("--config", str(file), "--dtype", "float", "--num-gpu-blocks-override", "64")
    assert (settings.served_model_names, settings.allowed_origins, settings.throughput_log) == (("a", "b"), ("*",), 0)
    assert (config.model.max_model_len, config.model.hf_overrides) == (2000, {"rope_theta": 1000000})
    assert config.model.dtype == "float32"  # the command line wins
    assert (config.compile.mode, config.compile.capture_sizes) == ("eager", (1, 2))
    assert not config.cache.enable_prefix_caching
    assert log == "Warning: --swap-space has no effect: preempted sequences are computed again, not swapped.\n"
    file.write_text("model: x\ncpu-offload-gb: 4\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--cpu-offload-gb 4 is not supported" in result.stderr


def test_the_model_may_be_in_the_config_file(serve: Serve, tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"model: {tiny_llama_dir}\n")
    config, settings, _ = serve("--config", str(file), *SMALL, "--served-model-name", "a", "b", with_model=False)
    assert (config.model.model, settings.served_model_names) == (str(tiny_llama_dir), ("a", "b"))
    file.write_text("port: 1\n")
    config, settings, _ = serve("--config", str(file), *SMALL, "--served-model-name", "a", str(tiny_llama_dir), with_model=False)
    assert (config.model.model, settings.served_model_names) == (str(tiny_llama_dir), ("a",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "long"], "A number must be like 4096, 32k (32000) or 32K (32768), got 'long'"),
        (["--max-model-len", "0"], "max_model_len must be at least 1, got 0"),
        (["--hf-overrides", "[1]"], "hf_overrides must be a JSON object"),
        (["--lora-modules", "{"], "--lora-modules: '{' is not valid JSON"),
        (["--lora-modules", '{"name": "a"}'], "--lora-modules takes NAME=PATH or"),
        (["--lora-modules", "a"], "--lora-modules takes NAME=PATH or"),
        (["--default-chat-template-kwargs", "x"], "--default-chat-template-kwargs must be a JSON object"),
        (["--reasoning-effort-map", "[]"], "--reasoning-effort-map must be a JSON object"),
        (["--quantization", "awq"], "awq is the format of quantized files"),
        (["--speculative-config", "{}", "--spec-tokens", "3"], "speculative_config: method must be one of"),
    ],
)
def test_a_wrong_value_is_one_sentence(tiny_llama_dir: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", str(tiny_llama_dir), "--enable-lora", *arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.stderr
    assert message in result.stderr


# --- the script that reads vLLM's source

SOURCE = {
    "vllm/config/model.py": '''
Words = Literal["a", "b"]
Both = Words | Literal["c"]
SIZE = 32
class ModelConfig:
    name: str = "x"
    """Text."""
    kind: Words = "a"
    other: Both | str = "c"
    many: list[str] | None = None
    on: bool = Field(default=True)
    size: int = Field(default=SIZE, ge=1)
    share: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    token: bool | str | None = None
    nested: "OtherConfig" = field(default_factory=OtherConfig)
class OtherConfig:
    x: int = 1
''',
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        kwargs = get_kwargs(ModelConfig)
        if True:
            group = parser.add_argument_group(title="Model", description="")
        group.add_argument("--name", "-n", **kwargs["name"])
        group.add_argument("--kind", **kwargs["kind"])
        group.add_argument("--other", **{**kwargs["other"], "default": None})
        for_many = kwargs["many"]
        group.add_argument("--many", **for_many)
        group.add_argument("--enable-it", **kwargs["on"])
        group.add_argument("--size", **kwargs["size"])
        group.add_argument("--share", **kwargs["share"])
        group.add_argument("--fields", **kwargs["fields"])
        group.add_argument("--token", **kwargs["token"])
        group.add_argument("--nested", **kwargs["nested"])
        parser.add_argument("--plain", action="store_true")
        parser.add_argument("--timeout", type=int, default=0)
class AsyncEngineArgs(EngineArgs):
    def add_cli_args(parser):
        parser.add_argument("--log", action=argparse.BooleanOptionalAction, default=False)
""",
    "vllm/entrypoints/common/cli_args.py": """
class Base:
    host: str | None = None
    origins: list[str] = field(default_factory=list)
    def _customize_cli_kwargs(cls, kwargs):
        kwargs["origins"]["type"] = json.loads
class FrontendArgs(Base):
    port: int = 8000
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--config", help="A file.")
""",
}


def wheel_of(tmp_path: Path, source: dict[str, str]) -> Path:
    wheel = tmp_path / "vllm-1.2.3-py3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in source.items():
            archive.writestr(name, text)
    return wheel


def test_flags_are_read_from_source(tmp_path: Path) -> None:
    found = {flag["flags"][0]: flag for flag in read_flags(wheel_of(tmp_path, SOURCE))}
    kinds = {name: (flag["kind"], flag["default"]) for name, flag in found.items()}
    assert kinds == {
        "--name": ("text", "x"),
        "--kind": ("text", "a"),
        "--other": ("text", "c"),
        "--many": ("values", None),
        "--enable-it": ("switch", "True"),
        "--size": ("int", "32"),
        "--share": ("float", None),
        "--fields": ("json", "{}"),
        "--token": ("optional", None),
        "--nested": ("json", "{}"),
        "--plain": ("switch", None),
        "--timeout": ("int", "0"),
        "--log": ("switch", "False"),
        "--config": ("text", None),
        "--host": ("text", None),
        "--origins": ("json", "[]"),
        "--port": ("int", "8000"),
    }
    assert found["--name"]["flags"] == ["--name", "-n"]
    assert (found["--name"]["group"], found["--plain"]["group"], found["--port"]["group"]) == ("Model", "Other", "Frontend")
    assert found["--kind"]["choices"] == ["a", "b"]
    assert "choices" not in found["--other"]
    assert found["--enable-it"]["off"] == ["--no-enable-it", "--disable-it"]
    assert "off" not in found["--plain"]


def test_source_that_is_not_understood_is_an_error(tmp_path: Path) -> None:
    changed = {name: text.replace('**kwargs["kind"]', "**something()") for name, text in SOURCE.items()}
    with pytest.raises(ValueError, match=r"--kind: something\(\) is not understood"):
        read_flags(wheel_of(tmp_path, changed))


def test_the_stored_flags_have_the_scripts_form() -> None:
    stored = json.loads(FLAGS_FILE.read_text())
    assert stored.keys() == {"version", "date", "flags"}
    assert len(stored["flags"]) == 320
    assert {flag["kind"] for flag in stored["flags"]} == set(SAMPLES)
