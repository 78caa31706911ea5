"""Captures a plain module as one FX graph."""
