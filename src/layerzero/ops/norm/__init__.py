"""Normalisation over the last axes."""
