"""Attention of whole models, by their own switches; and caches that grow in place."""
