"""Whole models: encoders without padding, compiled calls, and captured steps with what they keep."""
