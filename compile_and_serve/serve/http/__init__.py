"""HTTP below the routes: listeners, TLS, limits, bodies, middleware and streams."""
