"""API keys as tenants: their shares and limits, and where the limits are kept."""
