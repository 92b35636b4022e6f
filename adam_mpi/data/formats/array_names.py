"""The names of arrays by which formats find the images and labels of each part: train_images, x_test, train/labels."""

from collections.abc import Iterable
from pathlib import Path

from adam_mpi.base.errors import UserError

IMAGES = ("images", "features", "x")
LABELS = ("labels", "y")


def name_parts(path: Path, names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return which arrays are the images and labels of each part, by names like train_images, x_test, train/labels.

    Raises UserError when there are no training images.
    """
    plain = {name.lower().replace("/", "_"): name for name in names}
    found = {}
    for part in ("train", "test"):
        images, labels = (
            [n for word in words for n in (f"{part}_{word}", f"{word}_{part}") if n in plain]
            for words in (IMAGES, LABELS)
        )
        if images and labels:
            found[part] = plain[images[0]], plain[labels[0]]
    images, labels = ([word for word in words if word in plain] for words in (IMAGES, LABELS))
    if not found and images and labels:
        found["train"] = plain[images[0]], plain[labels[0]]
    if "train" not in found:
        held = ", ".join(sorted(plain.values())[:8]) or "nothing"
        raise UserError(f"{path}: no train_images and train_labels (or images and labels) in it; it holds {held}")
    return found
