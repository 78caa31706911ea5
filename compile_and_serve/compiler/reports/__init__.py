"""Reports about a compilation: dumps, the pass report, profiles."""
