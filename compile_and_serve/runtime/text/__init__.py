"""Text to token ids and back: tokenizers, chat templates, requests and their outputs."""
