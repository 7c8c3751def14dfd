"""Modules found by what they compute, each kind in a file: what is called in their place, and whether it pays."""
