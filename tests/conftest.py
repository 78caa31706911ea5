"""Fixtures that every folder of tests uses: tiny checkpoints with a tokenizer, and the real SmolLM2-135M-Instruct."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Workers of pytest-xdist share the cores. Read when torch is imported, and inherited by the processes that tests start.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

import torch

from tests.support.covering_cases import covering_cases, first_cases
from tests.support.forked_starts import fork_engines_and_ranks
from tests.support.made_once import made_once
from tests.support.triton_interpreter import make_interpreter_quicker

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a model hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Neither the terminal nor a CI service may change what commands print.
for name in ("GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS"):
    os.environ.pop(name, None)
os.environ["COLUMNS"] = "120"
# Triton reads it when it is imported, which is before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    make_interpreter_quicker()

TINY_VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


COMPILE_ONCE = Path(__file__).parent / "support" / "compile_once" / "g++"


def pytest_configure(config: pytest.Config) -> None:
    """Inductor's C++ code is compiled once in a run, by all workers and the processes that they start."""
    if "CXX" in os.environ or sys.platform != "linux" or shutil.which("g++") is None or shutil.which("bash") is None:
        return
    folder = tempfile.mkdtemp(prefix="compiled-once-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["CXX"], os.environ["COMPILED_ONCE"] = str(COMPILE_ONCE), folder


@pytest.fixture(scope="session", autouse=True)
def processes_are_forked() -> None:
    """Not where there is a GPU, whose driver does not outlive a fork."""
    if not torch.cuda.is_available() and os.environ.get("START_AS_USERS") != "1":
        fork_engines_and_ranks()


@pytest.fixture(scope="module", autouse=True)
def collected_once() -> None:
    """Objects that outlive a module are not scanned again: with all modules' objects, a collection takes two seconds."""
    gc.collect()
    gc.freeze()


gc.disable()  # while modules are imported and tests collected, nearly all of which lives to the end


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """The controller of pytest-xdist has this hook too, but no end of a collection."""
    gc.enable()


def pytest_sessionfinish() -> None:
    """Frozen objects would be taken for leaks at the end of the process."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--abuse", choices=("short", "long"), default="short", help="how long the server is abused")
    parser.addoption("--triples", action="store_true", help="parametrized cases run that three values need together, not only two")
    parser.addoption("--all-cases", action="store_true", help="all parametrized cases run, whether or not other cases have their values")
    parser.addoption("--all-prompts", action="store_true", help="speculation is tested on 200 prompts instead of 29")
    parser.addoption("--soak-seconds", type=float, default=10.0, help="how long the soak test sends load")
    parser.addoption("--screenshot", metavar="FILE", help="where the explorer's test writes the README's picture")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _check_words(config, items)
    _choose_pairwise(config, items)
    for item in items:
        if item.get_closest_marker("exhaustive"):
            item.add_marker("slow")
    _leave_cases_to_the_slow_tests(items)
    _leave_cases_to_the_exhaustive_tests(items)
    num_gpus = torch.cuda.device_count()
    for item in items:
        numbers = [(*marker.args, 2)[0] for marker in item.iter_markers("multigpu")]
        needed = max(numbers, default=int("gpu" in item.keywords))
        if needed > num_gpus:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {num_gpus}"))


def _check_words(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each word of `exhaustive_cases` has a case, if all tests were collected."""
    collected = [config.invocation_params.dir / argument for argument in config.args]
    if (
        collected != [config.rootpath / name for name in config.getini("testpaths")]
        or config.option.keyword
        or config.getoption("lf", False)
    ):
        return
    missing: dict[tuple[str, str], bool] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        for marker in item.iter_markers("exhaustive_cases"):
            for word in marker.kwargs.get("but", ()):
                missing[test, word] = missing.get((test, word), True) and word not in case
    if wrong := [f"{test}: {word}" for (test, word), is_missing in missing.items() if is_missing]:
        raise ValueError("Words of `exhaustive_cases` that no case has in its id:\n" + "\n".join(wrong))  # pytest-xdist hides a UsageError


def _choose_pairwise(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases that no pair of values needs are left out, unless --triples or --all-cases asks for more."""
    if config.getoption("--all-cases"):
        return
    size = 3 if config.getoption("--triples") else 2
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("pairwise"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        kept = covering_cases(values, size)
        left_out.update(case for number, case in enumerate(cases) if number not in kept)
    if left_out:
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


def _leave_cases_to_the_slow_tests(items: list[pytest.Item]) -> None:
    """Of a test marked `slow_cases` the first case that is not marked `slow` runs with `make test`."""
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("slow_cases") and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker("slow")
            seen.add(test)


def _leave_cases_to_the_exhaustive_tests(items: list[pytest.Item]) -> None:
    """Slow cases get the mark `exhaustive` if their values run in other cases too, or as the mark `exhaustive_cases` says."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        others = ("exhaustive", "gpu", "multigpu")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not any(map(item.get_closest_marker, others)):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: case.get_closest_marker("slow") is not None)
        kept = first_cases([{name: id(value) for name, value in case.callspec.params.items()} for case in cases])
        for number, case in enumerate(cases):
            marker = case.get_closest_marker("exhaustive_cases")
            is_kept = number in kept if marker is None else any(word in case.callspec.id for word in marker.kwargs.get("but", ()))
            if case.get_closest_marker("slow") and not is_kept:
                case.add_marker("exhaustive")


@pytest.fixture(autouse=True)
def _own_seed(request: pytest.FixtureRequest) -> None:
    """A test draws the same random numbers whichever tests ran before it."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """An empty folder whose path leaves room for names of sockets (107 bytes with the folder), which `tmp_path` may not."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_llama_dir(run_dir: Path) -> Path:
    """A Llama of 2 layers, 4 query and 2 key/value heads of 16, untied, float32, with tokenizer and chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(folder: Path) -> None:
        _write_tiny(folder, LlamaForCausalLM, LlamaConfig, tie_word_embeddings=False)

    return made_once(run_dir / "tiny-llama", make)


@pytest.fixture(scope="session")
def tiny_qwen3_dir(run_dir: Path) -> Path:
    """A Qwen3 of 2 layers, 4 query and 2 key/value heads of 32, tied, float32, with tokenizer and chat template."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(folder: Path) -> None:
        _write_tiny(folder, Qwen3ForCausalLM, Qwen3Config, tie_word_embeddings=True, head_dim=32)

    return made_once(run_dir / "tiny-qwen3", make)


@pytest.fixture(scope="session")
def shared_cache_dir(run_dir: Path) -> Path:
    """An artifact store of all workers, for tests to which it does not matter who compiled."""
    folder = run_dir / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as the product itself fetches it into the user's cache."""
    from compile_and_serve.runtime.weights import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path, run_dir: Path) -> Path:
    """The same model as a Hugging Face folder in bfloat16, so that transformers can be the reference."""
    return made_once(run_dir / "smollm2-135m-instruct", lambda folder: _write_smollm2(smollm2_gguf, folder))


def _write_smollm2(gguf: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    from compile_and_serve.runtime.weights import iter_tensors, read_config
    from compile_and_serve.runtime.weights.gguf_file import read_metadata

    config = read_config(gguf) | {"model_type": "llama", "dtype": "bfloat16"}
    del config["quantization_config"]  # the folder has the dequantized weights
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in iter_tensors(gguf)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = read_metadata(gguf)
    vocabulary = metadata["tokenizer.ggml.tokens"]
    control = [token for token, kind in zip(vocabulary, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    _write_tokenizer(
        folder,
        vocabulary={token: i for i, token in enumerate(vocabulary)},
        merges=merges,
        special_tokens=control,
        bos_token=vocabulary[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=vocabulary[metadata["tokenizer.ggml.eos_token_id"]],
        chat_template=metadata["tokenizer.chat_template"],
        split_digits=True,
    )


def _write_tiny(folder: Path, model_class: type, config_class: type, **overrides: object) -> None:
    sizes = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        # wide enough that greedy choices are not near ties
        "initializer_range": 0.2,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model_class(config_class(**(sizes | overrides))).save_pretrained(folder)
    bytes_alphabet = _byte_alphabet()
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *bytes_alphabet])}
    merges = [pair for pair in _common_pairs() if all(part in vocabulary for part in pair)]
    for left, right in merges[: TINY_VOCAB_SIZE - len(vocabulary)]:
        vocabulary[left + right] = len(vocabulary)
    _write_tokenizer(
        folder,
        vocabulary=vocabulary,
        merges=[pair for pair in merges if "".join(pair) in vocabulary],
        special_tokens=list(SPECIAL_TOKENS),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        split_digits=False,
    )


def _byte_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _common_pairs() -> list[tuple[str, str]]:
    pairs = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic"
    return [(pair[0], pair[1]) for pair in pairs.split()] + [("Ġ", letter) for letter in "taoswcbpfmdrhln"]


def _write_tokenizer(
    folder: Path,
    *,
    vocabulary: dict[str, int],
    merges: list[tuple[str, ...]],
    special_tokens: list[str],
    bos_token: str,
    eos_token: str,
    chat_template: str,
    split_digits: bool,
) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split_digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos_token,
        "eos_token": eos_token,
        "pad_token": eos_token,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
