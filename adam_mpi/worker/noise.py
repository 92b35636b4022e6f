"""Gaussian noise in the gradients of a push, for studies of what asynchrony does to training besides its delay."""

from collections.abc import Sequence

import numpy as np

from adam_mpi.model.parameters import Tensor


class Noise:
    def __init__(self, fraction: float, tensors: Sequence[Tensor], seed: int, member: int) -> None:
        """`fraction`: of the root mean square of each tensor's gradient."""
        self.fraction, self.tensors = np.float32(fraction), tensors
        self.draw = np.random.Generator(np.random.Philox(key=[seed, member]))

    def add(self, gradient: np.ndarray) -> None:
        for tensor in self.tensors:
            part = gradient[tensor.offset : tensor.offset + tensor.size]
            size = np.sqrt(np.dot(part, part) / np.float32(tensor.size))
            part += self.fraction * size * self.draw.standard_normal(tensor.size, np.float32)
