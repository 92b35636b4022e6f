"""Bytes of dense layers: gradients against activations and errors, by images per push and layer size."""

from functools import partial
from typing import Any

from _study import Found, Points, Scale, Table, dense, job, toml

TITLE = "Traffic of dense layers, delta against factor"
KIND = "measured, beside arithmetic"
PAPER = (
    "The paper sends activations and errors of dense layers: for k images k * (inputs + outputs) numbers instead of "
    "inputs * outputs."
)
UNITS, IMAGES, BATCH = (256, 1024), (32, 128, 512), 32
"""Of the layer, and in a push."""


def points(scale: Scale) -> Points:
    return {
        f"{protocol}, {units} units, {images} images": partial(_measured, scale, protocol, units, images)
        for units in UNITS
        for images in IMAGES
        for protocol in ("delta", "factor")
    }


def _measured(scale: Scale, protocol: str, units: int, images: int) -> dict[str, Any] | None:
    """Of the second layer, units x units: bytes per image that left the worker."""
    layers = [dense(units), "relu", dense(units), "relu", dense(10)]
    settings = [
        f"model.layers={toml(layers)}",
        "kernels.engine=reference",
        f"push.protocol={protocol}",
        f"push.images={images}",
        f"train.batch={BATCH}",
        "data.images=4096",
        "data.validation=0.01",
        "optimizer.learning_rate=0.001",
    ]
    found = job(scale, settings, epochs=1, ranks=3)
    if found is None:
        return None
    sent = found["traffic"][f"dense2 {protocol}"]
    # A push of gradients grows while the server is behind.
    per_push = found["images"] / found["pushes"]
    return {
        "protocol": protocol,
        "units": units,
        "wanted": images,
        "images": per_push,
        "bytes_per_image": sent / found["images"],
        "arithmetic": arithmetic(protocol, units, per_push),
    }


def arithmetic(protocol: str, units: int, images: float) -> float:
    """Bytes per image, without headers: all weights and biases once a push, or two vectors and the biases."""
    numbers = units * units + units if protocol == "delta" else images * 2 * units + units
    return 4 * numbers / images


def paint(axes: Any, found: Found) -> None:
    for index, units in enumerate(UNITS):
        for protocol, mark in (("delta", "o"), ("factor", "^")):
            own = [p for p in found.values() if p["units"] == units and p["protocol"] == protocol]
            counts, color = [point["images"] for point in own], f"C{index}"
            name = f"{protocol}, {units} x {units}"
            axes.plot(counts, [point["bytes_per_image"] / 1000 for point in own], mark, color=color, label=name)
            axes.plot(counts, [point["arithmetic"] / 1000 for point in own], "-", color=color, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="images in a push (lines: arithmetic)", ylabel="KB per image")
    axes.legend()


def table(found: Found) -> Table:
    """Return bytes of gradients over bytes of factors by layer and images of a push."""
    rows = [
        [f"{units} x {units}", str(images), f"{delta['bytes_per_image'] / factor['bytes_per_image']:.1f}"]
        for units in UNITS
        for images in IMAGES
        if (delta := found.get(f"delta, {units} units, {images} images"))
        and (factor := found.get(f"factor, {units} units, {images} images"))
    ]
    return [["layer", "images in a push", "bytes of gradient / bytes of factors"], *rows]


def verdict(found: Found) -> str:
    off = max(abs(point["bytes_per_image"] / point["arithmetic"] - 1) for point in found.values())
    return (
        f"What was sent differs from the arithmetic by {off:.1%} at the most (headers). Factors win while a push "
        "has fewer "
        "images than half the units, so which is sent is decided layer by layer."
    )
