"""torch's own kernels: attention, norms, paged gathers, flex attention, Inductor."""
