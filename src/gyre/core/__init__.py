"""Shared definitions: records, contracts, errors, seeds. Standard library, numpy and pydantic
only."""

VERSION = "0.1.0"  # of the package, as pyproject.toml has it
