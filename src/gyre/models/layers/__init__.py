"""The decoder layer as fused autograd functions."""
