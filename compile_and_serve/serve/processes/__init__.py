"""Several API processes of one server (`--api-server-count`)."""
