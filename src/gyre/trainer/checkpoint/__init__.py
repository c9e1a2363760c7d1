"""Snapshots: written in the background, verified, read back by any layout."""
