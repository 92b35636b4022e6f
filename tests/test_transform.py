"""Warps against scipy, and what happens to an image depends on nothing but seed, epoch and image."""

import math
import threading

import numpy as np
import pytest
from scipy import ndimage

from adam_mpi.base.counter_rng import key_of, mix, uniform
from adam_mpi.base.errors import UserError
from adam_mpi.config import Transform, load
from adam_mpi.data import glyphs, warp
from adam_mpi.data.transform import Transformer, moments, output
from adam_mpi.model.input_format import InputFormat

FULL = Transform(shift=1.5, rotation=10, scale=0.12, shear=0.1, elastic=0.6, reflect=True, brightness=0.2, contrast=0.2)
UINT8 = np.dtype(np.uint8)


@pytest.fixture(scope="module")
def images():
    return glyphs.draw_glyphs(1, "train", np.arange(40))[0]


def transformer(wanted, shape=(1, 28, 28), seed=1, sample=None, dtype=UINT8):
    return Transformer(wanted, shape, dtype, seed, None if sample is None else moments(sample))


def map_of(wanted, image, seed=1, epoch=1):
    """The affine map that an image should get, from its random numbers: matrix and offset for scipy, (y, x) order."""
    key = image_key(seed, epoch, image)
    turn = uniform(key, 0, -math.radians(wanted.rotation), math.radians(wanted.rotation))
    size = 1 / (1 + uniform(key, 1, -wanted.scale, wanted.scale))
    shear = uniform(key, 2, -wanted.shear, wanted.shear)
    mirror = -1 if wanted.reflect and uniform(key, 3, 0.0, 1.0) < 0.5 else 1
    across, down = uniform(key, 6, -wanted.shift, wanted.shift), uniform(key, 7, -wanted.shift, wanted.shift)
    turned = size * np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    matrix = (turned @ [[1, shear], [0, 1]] @ [[mirror, 0], [0, 1]])[::-1, ::-1]
    return matrix, np.array([down, across])


def image_key(seed, epoch, image):
    with np.errstate(over="ignore"):
        return np.uint64(mix(np.uint64(key_of(np.uint64(seed), epoch)) + np.uint64(image)))


@pytest.mark.parametrize(
    "wanted",
    [
        Transform(shift=3),
        Transform(rotation=30),
        Transform(scale=0.3),
        Transform(shear=0.4),
        Transform(reflect=True),
        Transform(shift=1.5, rotation=10, scale=0.12, shear=0.1, reflect=True),
    ],
)
@pytest.mark.parametrize("sides", [(28, 28), (17, 33), (1, 9)])
def test_affine_agrees_with_scipy(wanted, sides):
    noise = np.random.default_rng(0).integers(0, 256, (6, 2, *sides), np.uint8)
    made = transformer(wanted, (2, *sides))(noise, np.arange(6), 1)
    center = (np.array(sides) - 1) / 2
    for image in range(6):
        matrix, moved = map_of(wanted, image)
        for channel in range(2):
            offset = center + moved - matrix @ center
            truth = ndimage.affine_transform(
                noise[image, channel].astype(float), matrix, offset, order=1, mode="nearest"
            )
            # Positions are rounded to 1/256 of a pixel, and neighbors of noise differ by up to 255.
            assert np.abs(made[image, channel] - truth).max() < 2.6


def test_elastic_field_is_smooth_and_of_the_wanted_strength():
    across = warp.splines(28, 7)
    np.testing.assert_allclose(across.sum(axis=0), 1, rtol=1e-6)
    moves = []
    for image in range(200):
        field = np.zeros((2, *(len(across),) * 2), np.float32)
        warp._draw_field(image_key(1, 1, image), 0.8, field)
        moves.append(np.einsum("akl,kr,lc->arc", field, across, across) / warp.UNIT)
    moves = np.array(moves)
    assert math.sqrt((moves**2).mean()) == pytest.approx(0.8, rel=0.05)
    assert abs(moves.mean()) < 0.05
    assert math.sqrt((np.diff(moves, axis=3) ** 2).mean()) < 0.25


def test_elastic_bends_as_the_field_says(images):
    wanted = Transform(elastic=0.8)
    made = transformer(wanted)(images[:5], np.arange(5), 1)
    across = warp.splines(28, 7)
    rows, columns = np.mgrid[:28, :28]
    for image in range(5):
        field = np.zeros((2, *(len(across),) * 2), np.float32)
        warp._draw_field(image_key(1, 1, image), 0.8, field)
        x, y = np.einsum("akl,kr,lc->arc", field, across, across) / warp.UNIT
        truth = ndimage.map_coordinates(
            images[image, 0].astype(float), [rows + y, columns + x], order=1, mode="nearest"
        )
        assert np.abs(made[image, 0] - truth).max() < 2.6


def test_light():
    gray = np.full((30, 3, 4, 4), 100, np.uint8)
    made = transformer(Transform(brightness=0.1, contrast=0.2), (3, 4, 4))(gray, np.arange(30), 1).astype(int)
    assert (made == made[:, :1, :1, :1]).all() and len(np.unique(made[:, 0, 0, 0])) > 10
    # Contrast moves 100 by at most 0.2 * 27.5, brightness by 25.5.
    assert np.abs(made - 100).max() <= 32 and np.abs(made - 100).max() > 15
    black_and_white = np.tile(np.array([0, 255], np.uint8), (30, 1, 1, 2))
    made = transformer(Transform(brightness=0.5, contrast=0.5), (1, 1, 4))(black_and_white, np.arange(30), 1)
    assert made.min() == 0 and made.max() == 255


def test_crop_is_random_in_training_and_from_the_middle_elsewhere():
    image = np.arange(36, dtype=np.uint8).reshape(1, 1, 6, 6).repeat(200, axis=0)
    crop = transformer(Transform(crop=4), (1, 6, 6))
    assert crop.shape == (1, 4, 4)
    corners = crop(image, np.arange(200), 1)[:, 0, 0, 0]
    assert set(corners.tolist()) == {row * 6 + column for row in range(3) for column in range(3)}
    np.testing.assert_array_equal(crop(image, np.arange(200), None)[7, 0], image[7, 0, 1:5, 1:5])


def test_the_same_for_seed_epoch_and_image_only(images):
    apply, ids = transformer(FULL), np.arange(100, 140)
    whole = apply(images, ids, 3)
    shuffled = np.random.default_rng(1).permutation(40)
    np.testing.assert_array_equal(apply(images[shuffled], ids[shuffled], 3), whole[shuffled])
    np.testing.assert_array_equal(
        np.concatenate([apply(images[i : i + 1], ids[i : i + 1], 3) for i in range(40)]), whole
    )
    for other in (apply(images, ids, 4), transformer(FULL, seed=2)(images, ids, 3), apply(images, ids + 1, 3)):
        assert (other != whole).any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(apply(images, ids, None), images)


def test_threads_do_not_disturb_each_other(images):
    apply, ids = transformer(FULL), np.arange(40)
    truth, results = apply(images, ids, 1), {}

    def work(number):
        results[number] = [apply(images, ids, 1) for _ in range(30)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((made == truth).all() for number in range(3) for made in results[number])


def test_normalize_brings_channels_to_mean_0_and_deviation_1():
    sample = np.random.default_rng(0).integers(0, 100, (500, 3, 4, 4)).astype(np.uint8)
    sample[:, 1] //= 4
    sample[:, 2] = 9
    same = transformer(Transform(normalize=True), (3, 4, 4), sample=sample)(sample, np.arange(500), None)
    assert same is sample
    floats = sample.astype(np.float32)
    number = transformer(Transform(normalize=True), (3, 4, 4), sample=floats, dtype=floats.dtype)
    made = number(floats, np.arange(500), None)
    mean, factor = (tuple(values.ravel().tolist()) for values in moments(sample))
    levels = InputFormat("uint8", mean, factor).levels()
    np.testing.assert_array_equal(made, levels[np.arange(3)[:, None, None], sample])
    np.testing.assert_allclose(made.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(made.std(axis=(0, 2, 3)), [1, 1, 0], atol=1e-5)


def test_nothing_wanted_is_nothing_done(images):
    assert transformer(Transform())(images, np.arange(40), 1) is images


def test_what_cannot_work_is_named():
    with pytest.raises(UserError, match="crop = 30: images are 28 x 28"):
        output(Transform(crop=30), (1, 28, 28), UINT8)
    with pytest.raises(UserError, match="only normalize"):
        output(Transform(shift=1), (40, 1, 1), np.dtype(np.float32))
    assert output(Transform(normalize=True), (40, 1, 1), np.dtype(np.float32)) == ((40, 1, 1), np.float32)


@pytest.mark.parametrize(
    "setting, message",
    [
        ("data.transform.rotatoin=3", "did you mean data.transform.rotation"),
        ("data.transform.reflect=3", "data.transform.reflect = 3: expected true or false"),
    ],
)
def test_mistakes_in_the_configuration_are_named(setting, message):
    with pytest.raises(UserError, match=message):
        load(None, [setting])
