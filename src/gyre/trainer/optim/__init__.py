"""Optimizers over flat and sharded parameters, learning rate, loss scale."""
