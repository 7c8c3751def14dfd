"""Questions and orders above the engine: explain, doctor, control, bind, freeze, descriptors."""
