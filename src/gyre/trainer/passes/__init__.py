"""Forward and backward passes over packed micro-batches."""
