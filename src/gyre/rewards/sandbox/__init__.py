"""Runs untrusted programs within walls and limits."""
