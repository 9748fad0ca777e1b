"""The kernels of an absent device, chosen as torch chooses them."""
