"""What those who work on LayerZero run from a checkout, and what no installed package has: ``python -m tools``."""
