"""The protocol of a graph pass, the pass manager and the verifier."""
