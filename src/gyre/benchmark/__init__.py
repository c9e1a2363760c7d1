"""Benchmark: loads against any server of OpenAI's API, measured where its clients stand."""
