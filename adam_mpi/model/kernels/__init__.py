"""Plain numba kernels, image-innermost: activations are [channel][row][column][image], or [unit][image]."""
