"""What every room agrees on: records, contracts, errors, seeds. Standard library, numpy and
pydantic only."""
