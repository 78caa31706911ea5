"""The protocol of a graph pass, and what runs the passes."""
