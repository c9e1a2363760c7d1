"""The native rollout engine: tokens in, tokens out."""
