"""Server: the OpenAI-compatible API over an engine."""
