"""Load a trained network, classify images, and look at the output of a layer.

    python examples/train.py
    python examples/predict.py runs/example

Neither MPI nor the data set is needed; here the images are drawn by the generator of the data set.
"""

import sys

import numpy as np

import adam_mpi
from adam_mpi.data import glyphs


def main() -> None:
    model = adam_mpi.load(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
    images, labels = glyphs.draw_glyphs(1, "test", np.arange(8))

    probabilities = model.predict(images)
    for label, row in zip(labels, probabilities, strict=True):
        print(f"digit {label}: predicted {model.names[row.argmax()]} with probability {row.max():.2f}")

    # `fetch` names any layers; `feed` may also replace the output of a layer.
    (channels,) = model.run(feed={"input": images}, fetch=["relu1"])
    print(f"relu1 has shape {channels.shape}, {np.mean(channels == 0):.0%} of its values are 0")
    channels[:, 0] = 0
    (changed,) = model.run(feed={"relu1": channels}, fetch=["probabilities"])
    print(f"without channel 0 probabilities change by up to {np.abs(changed - probabilities).max():.3f}")


if __name__ == "__main__":
    main()
