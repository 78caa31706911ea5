"""A server for each replica, on a port of its own, and a process that watches them."""
