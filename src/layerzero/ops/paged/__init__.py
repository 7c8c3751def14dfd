"""Attention over a paged cache, and writing into one."""
