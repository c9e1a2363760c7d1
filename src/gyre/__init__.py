"""Gyre: rollout, score, train, hand the weights back. Importing this package loads no torch."""

__version__ = "0.1.0"
