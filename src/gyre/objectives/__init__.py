"""The mathematics of what is optimised: arrays in, arrays out."""
