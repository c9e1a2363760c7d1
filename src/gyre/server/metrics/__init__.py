"""Metrics: what the server counts, times and exposes."""
