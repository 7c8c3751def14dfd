"""What is learnt about kernels on this machine, and kept between processes."""
