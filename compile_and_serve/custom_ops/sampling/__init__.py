"""Kernels at the end of a decode step: sampling tokens, and preparing the next step's inputs."""
