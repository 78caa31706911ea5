"""The engine core, its process, and the clients that reach it."""
