"""Optimizer state, gradients and weights that stay in host memory or on disk."""
