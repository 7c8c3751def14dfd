"""Other libraries' models on LayerZero's functions: one file a library, imported only by who uses it."""
