"""The HTTP server around an Engine."""
