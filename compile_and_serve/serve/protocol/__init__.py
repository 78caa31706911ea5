"""Request bodies, and how answers are written."""
