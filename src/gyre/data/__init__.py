"""From files and tasks to prompts, examples and pairs, with a place to resume."""
