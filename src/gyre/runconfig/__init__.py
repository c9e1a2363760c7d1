"""Run config: one file's sections, read and checked."""
