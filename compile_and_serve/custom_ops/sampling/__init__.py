"""Kernels that end a decode step: choosing tokens, and the next step's inputs."""
