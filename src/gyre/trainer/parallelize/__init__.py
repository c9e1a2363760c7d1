"""Shards a decoder over ranks."""
