"""Engine, scheduler, model runner, sampling, text and weights: what drives a compiled model."""
