"""Tool parsers, one file per format of the models."""
