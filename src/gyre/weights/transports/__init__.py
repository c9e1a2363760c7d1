"""Transports: how the bytes of a registered version get to other processes."""
