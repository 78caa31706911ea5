"""The engine core, its process and its clients."""
