"""Ranks that work as one: groups, meshes, and how a process joins them."""
