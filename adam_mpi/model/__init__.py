"""Layer specs, the flat parameter vector, the kernels and the network that runs them."""
