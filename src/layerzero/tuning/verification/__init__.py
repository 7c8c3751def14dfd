"""Kernels prove themselves in children: vetting, rehearsals, suspects."""
