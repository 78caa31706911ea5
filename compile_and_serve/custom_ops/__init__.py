"""Every op that a captured graph may hold: reference in plain torch, registration, fake, one kernel choice a backend."""
