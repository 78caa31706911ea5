"""Small tokenizers trained on the spot, for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from compile_and_serve.runtime.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level_tokenizer(texts: Sequence[str], *, vocab_size: int = 300, template: str | None = TEMPLATE) -> Tokenizer:
    """Like GPT-2's: all 256 bytes, then merges learnt from `texts`; specials <|start|> and <|end|> (the end id)."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _wrap(backend, template)


def sentencepiece_tokenizer(texts: Sequence[str], *, vocab_size: int = 380) -> Tokenizer:
    """Like Llama-2's: byte fallback; encoding adds a space in front, decoding removes it."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<|start|>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    # The trainer makes every special an added token; the bytes must be plain entries of the vocabulary instead.
    model = backend.model
    rebuilt = Backend(model)
    rebuilt.normalizer, rebuilt.decoder = backend.normalizer, backend.decoder
    rebuilt.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials[:3]])
    return _wrap(rebuilt, TEMPLATE)


def _wrap(backend: Backend, template: str | None) -> Tokenizer:
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<|start|>", "eos_token": "<|end|>"},
        chat_templates={} if template is None else {"default": template},
    )
