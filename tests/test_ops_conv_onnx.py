"""ONNX rules of convolution, pooling, upsampling, moves of rows and recurrent layers, by onnxruntime."""

import pytest

from adam_mpi import nn, ready_models

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from test_ops_onnx import check  # noqa: E402

MAP = (4, 7, 8)


def indexed(kind, shape, places, *fields):
    return getattr(nn, kind)(nn.input(shape), nn.input(places, "integer", name="index"), *fields)


CASES = {
    "conv": lambda: nn.conv(nn.input(MAP), 6, [2, 3], stride=[2, 1], pad=[1, 0, 0, 2], dilation=[1, 2], groups=2),
    "conv 1-D": lambda: nn.conv(nn.input((4, 9)), 6, 3, pad=1),
    "conv 3-D": lambda: nn.conv(nn.input((2, 4, 5, 6)), 3, 2, pad=1, bias=False),
    "conv_transpose": lambda: nn.conv_transpose(nn.input(MAP), 6, 3, stride=2, pad=[1, 0, 1, 1], more=[1, 0], groups=2),
    "conv_transpose 1-D": lambda: nn.conv_transpose(nn.input((4, 5)), 3, 3, stride=3, dilation=2),
    "max_pool": lambda: nn.max_pool(nn.input(MAP), 3, stride=2, pad=1),
    "avg_pool": lambda: nn.avg_pool(nn.input(MAP), 3, stride=2, pad=1),
    "avg_pool counting": lambda: nn.avg_pool(nn.input(MAP), 3, stride=2, pad=1, count_pad=True),
    "avg_pool 3-D": lambda: nn.avg_pool(nn.input((2, 4, 3, 4)), 2),
    "global_avg_pool": lambda: nn.global_avg_pool(nn.input(MAP)),
    "global_max_pool": lambda: nn.global_max_pool(nn.input(MAP)),
    "nearest": lambda: nn.upsample(nn.input(MAP), [2, 3]),
    "bilinear": lambda: nn.upsample(nn.input(MAP), [2, 3], "bilinear"),
    "trilinear": lambda: nn.upsample(nn.input((2, 3, 2, 3)), 2, "bilinear"),
    "split": lambda: nn.split(nn.input((2, 6)), [1, 3, 2], axis=1)[1],
    "gather": lambda: indexed("gather", (4, 3), (5,)),
    "gather table": lambda: indexed("gather", (4, 3), (2, 3)),
    "segment_sum": lambda: indexed("segment_sum", (5, 2), (5,), 4),
    "segment_sum of several axes": lambda: indexed("segment_sum", (2, 3, 2), (2, 3), 4),
    "lstm": lambda: nn.lstm(nn.input((4, 3)), 5, depth=2, bidirectional=True),
    "gru": lambda: nn.gru(nn.input((4, 3)), 5, last=True),
    "unet": lambda: ready_models.unet((2, 8, 8), widths=(3, 4), dtype="float"),
}


@pytest.mark.parametrize("name", CASES)
def test_operators(name):
    made = CASES[name]()
    check(nn.graph(made) if isinstance(made, nn.Tensor) else made)
