"""From a batch of sequences to packed micro-batches."""
