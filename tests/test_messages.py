"""The encoding of control messages."""

import dataclasses

import pytest

from adam_mpi.cluster.control_messages import Message, decode_message, encode_message

EXAMPLES = {
    "bool": True,
    "int": 7,
    "float": 0.25,
    "str": "ü",
    "float | None": 0.5,
    "str | None": None,
    "list[int]": [3, 1, 2],
    "list[float]": [0.1, 1e-300],
    "list[str]": ["a", "ü"],
    "list[Any] | None": [4, "train", 0.5],
    "list[dict[str, float]]": [{"seconds": 0.25}],
    "collections.abc.Mapping[str, Any]": {"images": 10},
    "dict[str, Any]": {"images": 10, "loss": [0.5, None]},
}


def example(message):
    """Return a message of this class with a value of its own for each field."""
    return message(**{field.name: EXAMPLES[type_name(field.type)] for field in dataclasses.fields(message)})


def type_name(kind):
    return (
        kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind).replace("typing.", "")
    )


@pytest.mark.parametrize("message", [example(kind) for kind in Message.classes.values()], ids=lambda one: one.kind)
def test_every_message_survives_encoding_and_decoding(message):
    assert decode_message(encode_message(message)) == message


def test_every_message_has_a_kind_of_its_own():
    assert {kind.kind: kind for kind in Message.__subclasses__()} == Message.classes
    assert len(Message.classes) == len(Message.__subclasses__())


@pytest.mark.parametrize("data", [b'{"kind": "recipe", "salt": 1}', b'{"kind": null}'])
def test_an_unknown_kind_is_refused_by_name(data):
    with pytest.raises(
        ValueError, match="unknown control message ('recipe'|None); all ranks must run the same version"
    ):
        decode_message(data)
