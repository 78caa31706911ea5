"""Stored results of compilations: keys, folders and checks."""
