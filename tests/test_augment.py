"""Cutout, color jitter, padding and mixed images: against numpy, and a function of seed, epoch and image alone."""

import colorsys
import math

import numpy as np
import pytest

from adam_mpi.base.counter_rng import key_of
from adam_mpi.base.errors import UserError
from adam_mpi.config import Data, Transform, load
from adam_mpi.data import augment
from adam_mpi.data.batch_loader import BatchLoader
from adam_mpi.data.sets import open_set
from adam_mpi.data.transform import Transformer, moments, output
from adam_mpi.planning.plan import model
from adam_mpi.sharding.training_state import Phase

UINT8 = np.dtype(np.uint8)
IDS = np.arange(400)


def noise(shape=(3, 8, 9), count=400, low=1):
    return np.random.default_rng(0).integers(low, 256, (count, *shape), np.uint8)


def transformer(wanted, shape=(3, 8, 9), seed=1, sample=None):
    return Transformer(wanted, shape, UINT8, seed, None if sample is None else moments(sample))


ALL = [
    (Transform(cutout=4), (3, 8, 9)),
    (Transform(cutout=3), (1, 7, 5)),
    (Transform(saturation=0.5), (3, 8, 9)),
    (Transform(hue=0.3), (3, 5, 5)),
    (Transform(pad=2), (1, 7, 6)),
    (Transform(pad=2, crop=6, reflect=True), (3, 8, 9)),
    (Transform(pad=1, crop=5, cutout=3, saturation=0.2, hue=0.1, brightness=0.1), (3, 7, 7)),
]


@pytest.mark.parametrize(("wanted", "shape"), ALL)
def test_the_same_for_seed_epoch_and_image_only(wanted, shape):
    images = noise(shape, 40)
    apply, ids = transformer(wanted, shape), np.arange(100, 140)
    before = images.copy()
    whole = apply(images, ids, 3)
    assert whole.dtype == np.uint8 and (images == before).all()
    shuffled = np.random.default_rng(1).permutation(40)
    np.testing.assert_array_equal(apply(images[shuffled], ids[shuffled], 3), whole[shuffled])
    np.testing.assert_array_equal(
        np.concatenate([apply(images[i : i + 1], ids[i : i + 1], 3) for i in range(40)]), whole
    )
    for other in (apply(images, ids, 4), transformer(wanted, shape, seed=2)(images, ids, 3)):
        assert (other != whole).any(axis=(1, 2, 3)).mean() > 0.5
    inner = apply(images, ids, None)
    assert inner.shape == whole.shape
    if not wanted.crop:
        np.testing.assert_array_equal(inner, images)


def test_a_square_is_cut_out_and_nothing_else_changes():
    images = noise(low=1)
    made = transformer(Transform(cutout=4))(images, IDS, 1)
    erased = (made == 0).all(axis=1)
    np.testing.assert_array_equal(made, np.where(erased[:, None], 0, images))
    areas = erased.sum(axis=(1, 2))
    assert areas.max() == 16 and areas.min() < 12 and set(areas.tolist()) <= {a * b for a in range(5) for b in range(5)}
    # Every pixel is erased at some time, those in the middle most often.
    share = erased.mean(axis=0)
    assert share.min() > 0 and share[4, 4] > 1.4 * share[0, 0]
    for one in erased[:50]:
        rows, columns = np.flatnonzero(one.any(axis=1)), np.flatnonzero(one.any(axis=0))
        assert one.sum() == rows.size * columns.size and np.ptp(rows) == rows.size - 1


def test_the_square_of_normalized_images_is_their_mean():
    images = noise()
    made = transformer(Transform(cutout=4, normalize=True), sample=images)(images, IDS, 1)
    mean = np.rint(images.mean(axis=(0, 2, 3))).astype(np.uint8)
    changed = (made != images).any(axis=1)
    for channel in range(3):
        assert (made[:, channel][changed] == mean[channel]).all()


def test_saturation_keeps_brightness_and_grays():
    images = noise(low=90) // 2 + 60
    made = transformer(Transform(saturation=0.8))(images, IDS, 1).astype(float)
    weights = augment.TO_YIQ[0][:, None, None]
    np.testing.assert_allclose((made * weights).sum(axis=1), (images * weights).sum(axis=1), atol=1.1)
    spread = made.std(axis=1).mean(axis=(1, 2)) / images.std(axis=1).mean(axis=(1, 2))
    assert spread.min() < 0.4 and spread.max() > 1.5
    gray = np.repeat(noise((1, 4, 4)), 3, axis=1)
    assert (
        np.abs(transformer(Transform(saturation=0.8, hue=0.5), (3, 4, 4))(gray, IDS, 1) - gray.astype(int)).max() <= 1
    )


def test_hue_turns_by_up_to_its_limit():
    # Little saturation: there the two color planes have nearly the same angles.
    colors = np.empty((400, 3, 1, 1), np.uint8)
    colors[:] = np.array([150, 118, 118], np.uint8)[:, None, None]
    made = transformer(Transform(hue=0.25), (3, 1, 1))(colors, IDS, 1)[:, :, 0, 0]
    hues = np.array([colorsys.rgb_to_hsv(*(color / 255))[0] for color in made])
    turned = (hues + 0.5) % 1 - 0.5
    assert turned.min() < -0.2 and turned.max() > 0.2 and np.abs(turned).max() < 0.3
    assert abs(turned.mean()) < 0.03


def test_padding_moves_images_over_black():
    image = np.arange(1, 37, dtype=np.uint8).reshape(1, 1, 6, 6).repeat(400, axis=0)
    made = transformer(Transform(pad=2), (1, 6, 6))(image, IDS, 1)
    padded = np.pad(image[0, 0], 2)
    places = {(row, column): padded[row : row + 6, column : column + 6] for row in range(5) for column in range(5)}
    seen = [next(place for place, piece in places.items() if (piece == one).all()) for one in made[:, 0]]
    assert set(seen) == set(places)


def test_weights_are_those_of_the_beta_distribution():
    for alpha in (0.2, 1.0, 4.0):
        table = augment.weight_table(alpha)
        drawn = np.array([augment._draw_weight(np.uint64(key), table) for key in range(4000)])
        assert 0 <= drawn.min() and drawn.max() <= 1 and drawn.mean() == pytest.approx(0.5, abs=0.03)
        assert drawn.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_images_are_blended_by_their_weight():
    images, others = noise(), noise()[::-1].copy()
    mixed, weights = transformer(Transform(mixup=1.0)).mix(images, others, IDS, 1)
    own = weights[:, None, None, None].astype(float)
    assert np.abs(mixed - (own * images + (1 - own) * others)).max() <= 0.51
    assert weights.mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("shape", [(3, 8, 9), (1, 7, 5)])
def test_boxes_are_pasted_with_the_weight_of_their_area(shape):
    images, others = np.zeros((400, *shape), np.uint8), np.full((400, *shape), 200, np.uint8)
    mixed, weights = transformer(Transform(cutmix=1.0), shape).mix(images, others, IDS, 1)
    assert set(np.unique(mixed).tolist()) == {0, 200}
    share = (mixed == 200).all(axis=1).mean(axis=(1, 2))
    np.testing.assert_allclose(weights, 1 - share, atol=1e-6)
    assert 0.2 < share.mean() < 0.5 and share.max() > 0.8 and share.min() < 0.05


def test_with_both_each_image_gets_one():
    images, others = np.zeros((400, 1, 8, 8), np.uint8), np.full((400, 1, 8, 8), 200, np.uint8)
    mixed, _ = transformer(Transform(mixup=1.0, cutmix=1.0), (1, 8, 8)).mix(images, others, IDS, 1)
    blended = np.array([not set(np.unique(one).tolist()) <= {0, 200} for one in mixed])
    assert 0.4 < blended.mean() < 0.6


def test_partners_are_any_images_and_change_with_the_epoch():
    apply = transformer(Transform(mixup=1.0))
    found = apply.partners(IDS, 1, 50)
    assert set(found.tolist()) == set(range(50))
    assert (found != apply.partners(IDS, 2, 50)).mean() > 0.9
    np.testing.assert_array_equal(apply.partners(IDS[::-1], 1, 50), found[::-1])
    key = np.uint64(key_of(np.uint64(1), 1))
    np.testing.assert_array_equal(augment.partners(IDS, key, 50), found)


@pytest.fixture
def mixed_set(tmp_path):
    images = noise((6, 6, 3), 60)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(60) % 4)
    return Data(set=str(tmp_path / "set.npz"), validation=0.2, transform=Transform(cutmix=1.0, reflect=True))


def test_batches_of_mixed_images_have_two_classes_and_a_weight(mixed_set):
    data = open_set(mixed_set)
    assert [field.name for field in data.description.fields] == ["input", "target", "target2", "weight"]
    loader, ids = BatchLoader(data, 5), np.arange(data.description.train)
    phase = Phase(0, "train", 2)
    whole = loader.prepare(phase, ids)
    partners = loader.transformer.partners(ids, 2, data.description.train)
    np.testing.assert_array_equal(whole.targets["target2"], whole.labels[partners])
    assert whole.targets["weight"].dtype == np.float32 and 0 < np.ptp(whole.targets["weight"]) <= 1
    # The same in batches of any size, alone or together.
    batches = [ids[first : first + 7] for first in range(0, len(ids), 7)]
    for piece, batch in zip(batches, loader.start(phase, batches).result(), strict=True):
        np.testing.assert_array_equal(batch.pixels, whole.pixels[piece])
        for name in ("target", "target2", "weight"):
            np.testing.assert_array_equal(batch.targets[name], whole.targets[name][piece])
    held_out = loader.prepare(Phase(1, "validation", 2), np.arange(data.description.validation))
    assert (held_out.targets["weight"] == 1).all()
    np.testing.assert_array_equal(held_out.targets["target2"], held_out.labels)


def test_a_partner_that_cannot_be_used_leaves_an_image_as_it_is(mixed_set, monkeypatch):
    data = open_set(mixed_set)
    loader, ids = BatchLoader(data, 5), np.arange(data.description.train)
    read = data.read_usable

    def without_some(part, indices):
        kept, images, labels = read(part, indices)
        usable = indices[kept] % 3 != 0
        return kept[usable], images[usable], labels[usable]

    monkeypatch.setattr(data, "read_usable", without_some)
    batch = loader.prepare(Phase(0, "train", 2), ids)
    alone = loader.transformer.partners(ids, 2, data.description.train) % 3 == 0
    assert alone.any() and (batch.targets["weight"][alone] == 1).all()
    np.testing.assert_array_equal(batch.targets["target2"][alone], batch.labels[alone])
    assert (batch.targets["weight"][~alone] < 1).any()


def test_mixed_images_are_refused_where_the_loss_takes_one_class(mixed_set):
    config = load(None, [f"data.set={mixed_set.set}", "data.transform.mixup=0.2"])
    with pytest.raises(UserError, match="mixup and cutmix give each image two classes"):
        model(config, open_set(config.data).description)


@pytest.mark.parametrize(
    ("wanted", "shape", "dtype", "complaint"),
    [
        (Transform(hue=0.1), (1, 8, 8), "uint8", "saturation and hue need images of 3 channels, not 1"),
        (Transform(cutout=9), (3, 8, 8), "uint8", "cutout = 9: images are 8 x 8"),
        (Transform(pad=4, crop=9), (3, 8, 8), "uint8", "crop = 9: images are 8 x 8"),
        (Transform(mixup=0.2), (20, 1, 1), "float32", "only normalize works on them"),
        (Transform(cutout=1), (20, 1, 1), "float32", "only normalize works on them"),
        (Transform(normalize=True), (20, 1, 1), "int32", "integers are taken as they are"),
    ],
)
def test_what_cannot_work_is_named(wanted, shape, dtype, complaint):
    with pytest.raises(UserError, match=complaint):
        output(wanted, shape, np.dtype(dtype))


def test_the_colors_go_there_and_back():
    np.testing.assert_allclose(augment._color_matrix.py_func(1.0, 0.0), np.eye(3), atol=1e-12)
    half = augment._color_matrix.py_func(1.0, math.pi)
    np.testing.assert_allclose(half @ half, np.eye(3), atol=1e-12)
