"""Generated kernels: source emitted per layer shape over blocks of images that fill one vector, compiled by numba."""
