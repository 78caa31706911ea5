"""The engine as the server sees it: generations, adapters, and work that must not wait for it."""
