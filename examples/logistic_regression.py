"""Distributed logistic regression with the parameter server in a program of your own.

    mpirun -n 3 python examples/logistic_regression.py

The last rank serves; every other rank trains on samples of its own, and is at most DELAY pushes ahead of the server.
"""

import numpy as np
from mpi4py import MPI

from adam_mpi import Handle, ParameterServer

FEATURES = 50
SAMPLES = 2000
BATCH = 50
EPOCHS = 5
DELAY = 3
TRUTH = np.random.default_rng(0).normal(size=FEATURES)


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return samples and their labels, 0 or 1, which follow the weights TRUTH."""
    random = np.random.default_rng(seed)
    samples = random.normal(size=(SAMPLES, FEATURES))
    return samples, (random.random(SAMPLES) < sigmoid(samples @ TRUTH)).astype(float)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Return the logistic function of `values`."""
    return 1 / (1 + np.exp(-values))


def main() -> None:
    comm = MPI.COMM_WORLD
    with ParameterServer(comm, FEATURES, optimizer="descent", learning_rate=0.1) as server:
        if server.serve():
            return
        samples, labels = draw(seed=1 + comm.rank)
        pushes: list[Handle] = []
        for step in range(EPOCHS * SAMPLES // BATCH):
            batch = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
            # Bounded delay: the push DELAY steps ago is in these weights.
            weights = server.wait(server.pull(after=pushes[-DELAY:][:1]))
            errors = sigmoid(samples[batch] @ weights) - labels[batch]
            pushes.append(server.push((errors @ samples[batch] / BATCH).astype(np.float32)))
        weights = server.wait(server.pull(after=pushes))
    unseen, expected = draw(seed=10_000)
    accuracy = np.mean((unseen @ weights > 0) == expected)
    print(f"client {comm.rank}: accuracy {accuracy:.1%}, best possible {np.mean((unseen @ TRUTH > 0) == expected):.1%}")


if __name__ == "__main__":
    main()
