"""From a plain module to one FX graph."""
