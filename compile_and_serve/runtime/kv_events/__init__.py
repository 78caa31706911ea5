"""Events of the prefix cache, in vLLM's wire format: routers outside learn from them which engine has which blocks."""
