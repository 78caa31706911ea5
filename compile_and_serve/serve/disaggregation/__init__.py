"""`compile-and-serve route`: a router before servers that compute prompts and servers that generate the answers."""
