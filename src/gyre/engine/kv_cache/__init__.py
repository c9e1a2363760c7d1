"""The KV pool, its pages, and the prefixes that requests share."""
