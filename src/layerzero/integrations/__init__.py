"""Other libraries' models on LayerZero's functions: one file a library, imported on use only."""
