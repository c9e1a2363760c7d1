"""Asynchronous training: a collector and a learner, joined by credits."""
