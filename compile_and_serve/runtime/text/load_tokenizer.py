"""Load a model's tokenizer and its generation defaults from a folder or a .gguf file.

Sources, in order: tokenizer.json, the metadata of a GGUF file, or whatever transformers can convert. transformers is
imported only in the last case.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from compile_and_serve.models.folder_code import FolderCodeError, class_reference, load_class
from compile_and_serve.runtime.json_files import read_json_object
from compile_and_serve.runtime.text.built_in_templates import BUILT_IN_TEMPLATES
from compile_and_serve.runtime.text.gguf_tokenizer import tokenizer_from_gguf_metadata
from compile_and_serve.runtime.text.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from compile_and_serve.runtime.config import ModelConfig

logger = logging.getLogger(__name__)

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model folder or a .gguf file. Raises `TokenizerError` if there is none or it is damaged.

    trust_remote_code: a class that the folder brings (`auto_map` in tokenizer_config.json) may be run to convert it.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path)
    if not path.is_dir():
        raise TokenizerError(f"The tokenizer '{path}' is neither a folder nor a .gguf file: give the path of one of these.")
    if (path / "tokenizer.json").is_file():
        return _load_folder(path, _read_backend(path / "tokenizer.json"))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _load_gguf(ggufs[0])
    return _load_folder(path, _convert_with_transformers(path, trust_remote_code=trust_remote_code))


def load_model_tokenizer(config: ModelConfig) -> Tokenizer:
    """Load the tokenizer that an engine's options name. Raises `TokenizerError`, also if they say to load none."""
    if config.skip_tokenizer_init:
        raise TokenizerError("The engine runs without a tokenizer: start it without skip_tokenizer_init.")
    path = config.path if config.tokenizer is None else config.tokenizer
    return load_tokenizer(path, trust_remote_code=config.trust_remote_code)


def load_generation_defaults(path: str | Path) -> dict[str, float | int]:
    """Sampling defaults from the model's generation_config.json, by field name of `SamplingParams`.

    Empty if there is no such file, or if it sets do_sample to false. Raises `TokenizerError` if it is not a JSON object.
    """
    path = Path(path)
    config = _read_json(path / "generation_config.json") if path.is_dir() else {}
    found = {name: config[name] for name in GENERATION_DEFAULTS if isinstance(config.get(name), (int, float))}
    return {} if config.get("do_sample") is False else found


def _load_gguf(path: Path) -> Tokenizer:
    from compile_and_serve.runtime.weights.gguf_file import read_metadata

    return tokenizer_from_gguf_metadata(read_metadata(path), source=str(path))


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{file} cannot be read as a tokenizer ({error}): check that the file is complete.") from error


def _convert_with_transformers(path: Path, *, trust_remote_code: bool) -> tokenizers.Tokenizer:
    if importlib.util.find_spec("transformers") is None:
        raise TokenizerError(f"'{path}' has no tokenizer.json: add one, or install transformers, which can convert other formats.")
    from transformers import AutoTokenizer

    logger.info("%s has no tokenizer.json; transformers converts the tokenizer that it finds.", path)
    reference = class_reference(_read_json(path / "tokenizer_config.json"), "AutoTokenizer")
    try:
        if trust_remote_code and reference is not None:
            load_class(path, reference)  # says in the log what is run
        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    except FolderCodeError as error:
        raise TokenizerError(str(error)) from error
    except Exception as error:  # any of a dozen types, depending on which file is missing
        if reference is not None and not trust_remote_code:
            raise TokenizerError(
                f"'{path}' has no tokenizer.json, and its tokenizer is code of its own ({reference}), which only --trust-remote-code runs: "
                "set that flag, or add a tokenizer.json."
            ) from None
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"'{path}' has no tokenizer that can be loaded: add a tokenizer.json (transformers: {first_line}).") from error
    backend = getattr(converted, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"The tokenizer in '{path}' has no fast version ({type(converted).__name__}): add a tokenizer.json.")
    return backend


def _load_folder(path: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    tokens = {**_read_json(path / "special_tokens_map.json"), **config}
    _add_missing_tokens(backend, path, tokens)
    special = {name: text for name in SPECIAL_NAMES if (text := _token_text(tokens.get(name))) is not None}
    return Tokenizer(
        backend, special_tokens=special, eos_token_ids=_eos_ids(path), chat_templates=_folder_templates(path, config), source=str(path)
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, path: Path, tokens: Mapping[str, Any]) -> None:
    """Add the tokens that only other files than tokenizer.json name: in the order of their ids, then those without ids.

    tokens: of special_tokens_map.json and tokenizer_config.json.
    """
    special = [text for name in SPECIAL_NAMES if (text := _token_text(tokens.get(name))) is not None]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = tokens.get(name) or []
        special += [text for one in (more.values() if isinstance(more, dict) else more) if (text := _token_text(one)) is not None]
    listed: dict[int, Mapping[str, Any]] = {}
    for text, token_id in _read_json(path / "added_tokens.json").items():
        listed[int(token_id)] = {"content": text, "normalized": False, "special": text in special}
    for token_id, entry in (tokens.get("added_tokens_decoder") or {}).items():
        listed[int(token_id)] = entry
    entries = [listed[token_id] for token_id in sorted(listed)]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}  # a text in the vocabulary alone may still be split
    for entry in (*entries, *({"content": text, "normalized": False, "special": True} for text in special)):
        if entry["content"] not in added:
            added.add(entry["content"])
            flags = {k: bool(entry[k]) for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
            token = tokenizers.AddedToken(entry["content"], **flags)
            (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])


def _eos_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is not None:
            return [int(v) for v in value] if isinstance(value, list) else [int(value)]
    return []


def _folder_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    stored = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        found.update({entry["name"]: entry["template"] for entry in stored})
    legacy = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    if not found and (built_in := BUILT_IN_TEMPLATES.get(str(_read_json(path / "config.json").get("model_type")))):
        found["default"] = built_in
    return found


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    return read_json_object(file, TokenizerError)
