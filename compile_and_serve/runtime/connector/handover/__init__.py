"""Handover of requests between engines: one computes prompts, another generates the answers."""
