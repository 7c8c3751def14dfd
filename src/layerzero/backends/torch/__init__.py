"""torch's own kernels: a file of each family, and flex attention and Inductor."""
