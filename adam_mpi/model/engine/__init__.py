"""The generated engine: kernels emitted as source per layer shape, over blocks of images that fill one vector."""
