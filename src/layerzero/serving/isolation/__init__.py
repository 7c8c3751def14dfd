"""Kernels in processes of their own: the memory they share with this one, their messages, their starts and ends."""
