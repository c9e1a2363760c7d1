"""Shared definitions: records, contracts, errors, seeds. Standard library, numpy and pydantic
only."""
