"""Attention on contiguous keys and values."""
