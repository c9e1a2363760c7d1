"""Predicted bytes of each component and phase."""
