"""Names and schema version of a dump's files. Readers import it without torch."""

from __future__ import annotations

SCHEMA = 1  # of report.json; raised with every change that readers of the old format would misread
REPORT = "report.json"
BYTECODE, SPLIT, COMPILED, FORWARD = "00_dynamo_bytecode.py", "90_split", "91_compiled", "92_forward.py"
