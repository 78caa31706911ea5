"""vLLM's command line: its flags as data, what this project does with each, and the translation of arguments."""
