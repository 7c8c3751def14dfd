"""Whole layers of decoders and encoders: found by their parts, computed by one forward, timed in a row."""
