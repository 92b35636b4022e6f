"""Sparse logistic regression on generated clicks, with the parameter server as a library.

    mpirun -n 3 python scripts/clicks.py

The last rank serves; the others train, each on clicks of its own: pull the weights that a batch needs, push their
gradient as (index, value) pairs, and run at most DELAY pushes ahead of the server.
"""

import numpy as np
from mpi4py import MPI

from adam_mpi import ParameterServer, significant

FEATURES, PER_CLICK, CLICKS, BATCH, EPOCHS, DELAY = 20_000, 12, 20_000, 200, 3, 4


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Clicks: which features each has (few are common, most are rare), and whether it came to a click."""
    random, weights = np.random.default_rng(seed), truth()
    features = (FEATURES * random.random((CLICKS, PER_CLICK)) ** 4).astype(np.int64)
    clicked = random.random(CLICKS) < 1 / (1 + np.exp(-weights[features].sum(axis=1)))
    return features, clicked.astype(np.float32)


def truth() -> np.ndarray:
    """The weights that clicks are drawn by: nobody can be better than they are."""
    return np.random.default_rng(0).standard_normal(FEATURES)


def log_loss(weights: np.ndarray, features: np.ndarray, clicked: np.ndarray) -> float:
    scores = weights[features].sum(axis=1)
    return float(np.mean(np.logaddexp(0, scores) - clicked * scores))


def gradient(weights: np.ndarray, places: np.ndarray, clicked: np.ndarray) -> np.ndarray:
    """Of the mean loss of a batch, for the weights at hand; `places` says which of them each click has."""
    errors = 1 / (1 + np.exp(-weights[places].sum(axis=1))) - clicked
    summed = np.bincount(places.ravel(), np.repeat(errors, PER_CLICK), weights.size)
    return (summed / len(clicked)).astype(np.float32)


def train(server: ParameterServer, features: np.ndarray, clicked: np.ndarray) -> None:
    pushes = []
    for first in range(0, CLICKS, BATCH):
        batch = slice(first, first + BATCH)
        used, places = np.unique(features[batch], return_inverse=True)
        # Bounded delay: what was pushed DELAY batches ago is in these weights.
        weights = server.wait(server.pull(indices=used, after=pushes[-DELAY:][:1]))
        change = gradient(weights, places.reshape(-1, PER_CLICK), clicked[batch])
        pushes.append(server.push(change, indices=used))


def main() -> None:
    comm = MPI.COMM_WORLD
    with ParameterServer(comm, FEATURES, optimizer="adagrad", learning_rate=0.1, filter=significant(1e-4)) as server:
        if server.serve():
            return
        features, clicked = draw(seed=1 + comm.rank)
        unseen = draw(seed=10_000)
        if comm.rank == 0:
            print(f"best possible: {log_loss(truth(), *unseen):.4f}", flush=True)
        for epoch in range(EPOCHS + 1):
            # Other clients may have begun to train when this one pulls for the first time.
            weights = server.wait(server.pull()) if epoch else np.zeros(FEATURES, np.float32)
            loss = log_loss(weights, *unseen)
            if comm.rank == 0:
                print(f"after {epoch} epochs: log-loss {loss:.4f}", flush=True)
            if epoch < EPOCHS:
                train(server, features, clicked)


if __name__ == "__main__":
    main()
