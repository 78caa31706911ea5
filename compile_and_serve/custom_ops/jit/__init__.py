"""Builds and loads kernels: C++, CUDA C++, Triton."""
