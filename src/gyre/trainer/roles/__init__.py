"""The models of a trainer: trained, reference, and the memory they own."""
