"""From logits to a token with its log-probabilities."""
