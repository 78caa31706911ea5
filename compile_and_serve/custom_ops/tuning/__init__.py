"""Measures which of several kernels is the fastest on this device, and keeps the outcome."""
