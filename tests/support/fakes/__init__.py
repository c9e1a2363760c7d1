"""Fakes that satisfy the contracts."""
