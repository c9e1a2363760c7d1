"""Engines of other projects, each in a process and an environment of its own."""
