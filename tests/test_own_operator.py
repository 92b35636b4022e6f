"""Operators of the user's own: registered from a file, trained as others are, refused by name where they are wrong."""

import re
from pathlib import Path

import graphs
import numpy as np
import pytest

from adam_mpi import nn
from adam_mpi.base.errors import UserError
from adam_mpi.config.training_sections import Model
from adam_mpi.model.frontends import configured
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.input_format import InputFormat
from adam_mpi.model.ops import external
from adam_mpi.model.ops.operator import REGISTRY

PAGE = Path(__file__).parents[1] / "docs" / "howto" / "extending.md"


@pytest.fixture(autouse=True)
def registry():
    """Forget afterwards what a test registers."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    external._loaded.clear()


@pytest.fixture
def mine(tmp_path):
    """Return a file with the operator that the documentation shows."""
    path = tmp_path / "mine.py"
    path.write_text(re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1))
    return path


def test_the_operator_of_the_documentation_is_trained(mine):
    assert external.load(str(mine)) == ("threshold",)
    x = nn.threshold(nn.dense(nn.input((3,)), 4), limit=0.25)
    graphs.check(nn.graph(x, nn.mean(nn.elementwise(lambda v: v * v, x))))


def test_a_configuration_names_the_file(mine):
    layers = [{"kind": "dense", "units": 4}, {"kind": "threshold", "limit": 2.0}, {"kind": "dense", "units": 3}]
    made = configured.infer(Model(layers=layers, operators=str(mine)), (1, 2, 2), 3, InputFormat())
    assert isinstance(made, GraphLayers)
    assert [node.name for node in made.graph.nodes].count("threshold1") == 1


def test_a_file_is_run_once(mine):
    external.load(str(mine))
    assert external.load(str(mine)) == ("threshold",)


def test_a_rule_that_is_missing_is_named(mine):
    mine.write_text(mine.read_text().partition("    def gradient")[0])
    external.load(str(mine))
    x = nn.threshold(nn.dense(nn.input((3,)), 4))
    graph = nn.graph(x, nn.mean(x))
    with pytest.raises(UserError, match="operator threshold has no gradient rule"):
        graphs.check_gradient(graph, graphs.random_feed(graph, 2), np.ones(graph.size))


@pytest.mark.parametrize(
    "text, message",
    [
        ("x = 1\n", "registers no operator"),
        ("x = 1\ny = unknown\n", "line 2: NameError: name 'unknown' is not defined"),
        ("def f(:\n", "line 1: invalid syntax"),
        ("from adam_mpi.model.ops.operator import register\nregister('mine')(int)\n", "TypeError"),
        (
            "from adam_mpi.model.ops.operator import *\n@register('mine')\nclass A: pass\n",
            "'mine' is no frozen dataclass",
        ),
        ("from adam_mpi.model.ops.operator import *\n@register('relu')\nclass A: pass\n", "'relu' is registered twice"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(mine, text, message):
    mine.write_text(text)
    before = dict(REGISTRY)
    with pytest.raises(UserError, match=f"model.operators: .*mine.py.*{message}") as caught:
        external.load(str(mine))
    assert "\n" not in str(caught.value)
    assert before == REGISTRY


def test_a_file_that_is_missing_is_refused():
    with pytest.raises(UserError, match="model.operators is 'nowhere.py', which is no file"):
        external.load("nowhere.py")
