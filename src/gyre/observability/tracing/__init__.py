"""Traces: spans of requests and of training steps, sent to a collector by OTLP."""
