"""Fakes that satisfy the contracts; usable from configs as kind = "fake"."""
