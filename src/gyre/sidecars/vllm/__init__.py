"""vLLM as a rollout engine: the contract's calls, by vLLM's own classes."""
