"""The mathematics of the objectives: arrays in, arrays out."""
