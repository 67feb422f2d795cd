"""meshpar."""
