"""Serving: from a model folder to a server, and to the weights that it serves."""
