"""The runtime around a compiled model: engine, scheduler, model runner, sampling, text and weights."""
