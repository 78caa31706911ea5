"""`LLM`: the engine in the caller's process, without a server."""
