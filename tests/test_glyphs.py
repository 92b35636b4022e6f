import numpy as np
import pytest
from scipy.optimize import minimize

from adam_mpi.base import counter_rng
from adam_mpi.data import glyphs


@pytest.fixture(scope="module")
def drawn():
    return {
        part: glyphs.draw_glyphs(0, part, np.arange(n)) for part, n in (("train", glyphs.TRAIN), ("test", glyphs.TEST))
    }


def test_shape_type_and_contrast(drawn):
    images, labels = drawn["test"]
    assert images.shape == (glyphs.TEST, 1, 28, 28) and images.dtype == np.uint8
    assert labels.shape == (glyphs.TEST,) and labels.dtype == np.uint8
    # The glyph stands out of the grain in every image, and never fills it.
    assert images.max(axis=(1, 2, 3)).min() > 140
    assert 4 < images.mean(axis=(1, 2, 3)).min() and images.mean(axis=(1, 2, 3)).max() < 140


def test_classes_are_balanced(drawn):
    for part, size in (("train", glyphs.TRAIN), ("test", glyphs.TEST)):
        counts = np.bincount(drawn[part][1], minlength=glyphs.CLASSES)
        assert counts.tolist() == [size // glyphs.CLASSES] * glyphs.CLASSES


def test_an_image_depends_on_seed_part_and_index_only(drawn):
    images, labels = drawn["train"]
    chosen = np.random.default_rng(3).integers(0, glyphs.TRAIN, 500)
    again, again_labels = glyphs.draw_glyphs(0, "train", chosen)
    assert np.array_equal(again, images[chosen]) and np.array_equal(again_labels, labels[chosen])
    assert not np.array_equal(glyphs.draw_glyphs(1, "train", chosen)[0], again)
    assert not np.array_equal(glyphs.draw_glyphs(0, "test", chosen)[0], again)


def test_no_two_images_are_equal(drawn):
    everything = np.concatenate(
        [drawn["train"][0], drawn["test"][0], glyphs.draw_glyphs(1, "train", np.arange(4000))[0]]
    )
    assert len({image.tobytes() for image in everything}) == len(everything)


def test_random_numbers_are_uniform_and_unrelated():
    keys = range(300)
    rolls = np.array(
        [[counter_rng.uniform(np.uint64(key), number, -1.0, 1.0) for number in range(100)] for key in keys]
    )
    assert rolls.min() >= -1 and rolls.max() < 1
    assert np.abs(np.histogram(rolls, 10, (-1, 1))[0] - 3000).max() < 250
    assert np.abs(np.corrcoef(rolls.T) - np.eye(100)).max() < 0.3
    assert np.abs(np.corrcoef(rolls) - np.eye(300)).max() < 0.55


def softmax_regression(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Weights [785, 10] of a multinomial logistic regression, by L-BFGS with a little ridge."""
    wanted = np.eye(glyphs.CLASSES, dtype=np.float32)[labels]
    rows = np.arange(len(labels))

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, glyphs.CLASSES).astype(np.float32)
        logits = images @ weights
        logits -= logits.max(axis=1, keepdims=True)
        probabilities = np.exp(logits)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        value = -np.log(probabilities[rows, labels] + 1e-12).mean() + 5e-5 * (weights**2).sum()
        slope = images.T @ (probabilities - wanted) / len(images) + 1e-4 * weights
        return float(value), slope.ravel().astype(np.float64)

    start = np.zeros(images.shape[1] * glyphs.CLASSES)
    return minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 100}).x.reshape(-1, glyphs.CLASSES)


@pytest.mark.slow
def test_a_linear_model_is_not_enough(drawn):
    def features(images: np.ndarray) -> np.ndarray:
        return np.pad(images.reshape(len(images), -1).astype(np.float32) / 255, ((0, 0), (0, 1)), constant_values=1)

    weights = softmax_regression(features(drawn["train"][0]), drawn["train"][1])
    accuracy = ((features(drawn["test"][0]) @ weights).argmax(axis=1) == drawn["test"][1]).mean()
    assert 0.7 < accuracy < 0.93, accuracy
