"""Which kernels a device that is not here would run, chosen as torch chooses them."""
