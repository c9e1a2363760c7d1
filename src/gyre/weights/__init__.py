"""The checkpoint engine: a policy version, whole, from the trainer to engines."""
