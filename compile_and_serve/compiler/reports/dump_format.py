"""Names and version of a dump's files, for who writes one and who reads it (needs nothing else, torch included)."""

from __future__ import annotations

SCHEMA = 1  # of report.json; raised when a reader of the old one would misread the new one
REPORT = "report.json"
BYTECODE, SPLIT, COMPILED, FORWARD = "00_dynamo_bytecode.py", "90_split", "91_compiled", "92_forward.py"
