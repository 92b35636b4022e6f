"""The sections about data and model: what is trained on what, and with which kernels."""

from dataclasses import dataclass, field
from typing import Any

from adam_mpi.config.fields import limited


@dataclass
class Transform:
    shift: float = limited(0.0, low=0.0)
    """Shift each training image by a random distance of up to this many pixels in x and in y."""
    rotation: float = limited(0.0, low=0.0, high=180.0)
    """Rotate each training image by a random angle of up to this many degrees in either direction."""
    scale: float = limited(0.0, low=0.0, high=0.9)
    """Scale each training image by a random factor between 1 minus and 1 plus this fraction: 0.12 is 0.88 to 1.12."""
    shear: float = limited(0.0, low=0.0, high=2.0)
    """Shear each training image horizontally by up to this many columns per row."""
    elastic: float = limited(0.0, low=0.0)
    """Distort each training image by a smooth random field; its root mean square displacement is this many pixels."""
    spacing: int = limited(7, low=2)
    """Distance in pixels between the control points of the elastic field; a larger distance is smoother."""
    reflect: bool = False
    """Mirror each training image left to right with probability 1/2."""
    crop: int = limited(0, low=0)
    """Side in pixels of the square cropped from each image, at random in training and from the center in evaluation;
    0 uses the whole image."""
    brightness: float = limited(0.0, low=0.0, high=1.0)
    """Brighten or darken each training image by a random amount of up to this fraction of white."""
    contrast: float = limited(0.0, low=0.0, high=1.0)
    """Multiply the contrast of each training image by a random factor between 1 minus and 1 plus this fraction."""
    normalize: bool = False
    """Normalize each channel (or feature) to mean 0 and standard deviation 1 over the training part; data ranks then
    send 4 bytes per value instead of 1."""


@dataclass
class Data:
    set: str = "glyphs"
    """Data set: glyphs (built in), mnist, fashion, noise:3x32x32:10, or the path of files (formats: data/README.md)."""
    validation: float = limited(1 / 12, low=0.0, high=0.5)
    """Fraction of the training set that is held out and evaluated at the end of each epoch."""
    images: int = limited(0, low=0)
    """Number of images of the training part to train on; 0 uses all of them."""
    prefetch: int = limited(16, low=1, high=64)
    """Batches that a replica requests ahead of use; it requests fewer toward the end of an epoch, so that no replica
    waits for batches that another has prefetched."""
    cache: int = limited(1 << 30, low=0)
    """Bytes of images that a data rank caches in memory; images beyond that are read from disk again in each epoch."""
    threads: int = limited(1, low=1, high=256)
    """Number of threads of a data rank that transform images."""
    size: int = limited(0, low=0)
    """Side in pixels to which images of a folder are scaled and center-cropped; 0 requires images of equal size."""
    on_bad: str = limited("stop", choices=("stop", "skip"))
    """Reaction to an unreadable image, an invalid label or a NaN feature: stop the job, or skip and count the image."""
    skew: str = "none"
    """Unequal distribution of classes over replicas, for studies: none, by_class, or dirichlet:ALPHA (a smaller ALPHA
    is more unequal); any but none implies `epoch.assignment = "static"`."""
    transform: Transform = field(default_factory=Transform)


# The paper's MNIST network.
LAYERS: list[Any] = [
    {"kind": "conv", "channels": 10, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "conv", "channels": 20, "kernel": 5},
    "relu",
    {"kind": "max_pool", "size": 2},
    {"kind": "dense", "units": 400},
    "relu",
    {"kind": "dense", "units": 400},
    "relu",
    {"kind": "dense", "units": 10},
]


@dataclass
class Model:
    layers: list[Any] = limited(LAYERS)
    """List of layers: conv, max_pool, avg_pool, lrn, dense, relu, tanh, sigmoid, dropout; a softmax over the units of
    the last dense layer follows."""
    weights: str = ""
    """File of initial weights, the `weights.h5` of a run or of `adam_mpi import`; empty draws random ones."""


@dataclass
class Kernels:
    engine: str = limited("generated", choices=("generated", "reference"))
    """Kernels that compute: generated for this CPU and these layers, or the slow reference they are tested against."""
    tune: bool = False
    """Choose the algorithm of each convolution by measuring the candidates, once per machine, instead of by a cost
    model."""
