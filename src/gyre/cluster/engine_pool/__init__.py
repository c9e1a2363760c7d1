"""Several engines behind one contract: routing, retries, lost replicas."""
