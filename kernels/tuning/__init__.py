"""Search for the tuning parameters of kernels, and the records of what was found."""
