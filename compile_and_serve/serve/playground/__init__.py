"""The chat playground at `/`."""
