"""Noise in gradients, for studies: it has the requested size, and is the same for the same seed."""

import numpy as np
import pytest

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.model.parameters import Tensor
from adam_mpi.worker.gradient_buffer import Noise

TENSORS = [Tensor("a/weight", "a", (50_000,), 0, 50_000), Tensor("b/weight", "b", (50_000,), 50_000, 50_000)]


def noisy(seed: int) -> np.ndarray:
    gradient = np.repeat(np.float32([2.0, 0.01]), 50_000)
    Noise(0.5, TENSORS, seed, 3).add(gradient)
    return gradient


def test_noise_is_a_fraction_of_each_tensor() -> None:
    gradient = noisy(1)
    assert gradient[:50_000].std() == pytest.approx(1.0, rel=0.02)
    assert gradient[50_000:].std() == pytest.approx(0.005, rel=0.02)
    assert gradient.dtype == np.float32 and gradient[:50_000].mean() == pytest.approx(2.0, abs=0.02)


def test_noise_depends_on_the_seed_only() -> None:
    assert np.array_equal(noisy(1), noisy(1)) and not np.array_equal(noisy(1), noisy(2))


def test_noise_needs_pushes_of_gradients() -> None:
    assert config.load(None, ["inject.noise=0.1", "push.protocol=delta"]).inject.noise == 0.1
    with pytest.raises(UserError, match="inject.noise"):
        config.load(None, ["inject.noise=0.1"])
