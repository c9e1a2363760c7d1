"""Snapshots: written in the background, verified, loaded under any layout."""
