"""Executors: ranks in this process, in others, on other hosts."""
