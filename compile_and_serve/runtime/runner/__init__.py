"""One rank's device: its KV cache, the inputs of a step, and the step itself."""
