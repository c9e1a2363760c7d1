"""Bench: `gyre bench serve`."""
