"""argv to a call."""
