"""How many turns tokens take with the slots of an expert. The engine process reads it, which imports no torch."""

TURNS = 32
