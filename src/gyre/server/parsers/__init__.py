"""Parsers: an answer's text, as it comes, to content, reasoning and tool calls. All are pure."""
