"""The configuration: defaults, the file, --set; the error for a mistake is one line that names its key."""

import dataclasses
import math
import tomllib

import pytest

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.config import reading


def complaint(path=None, *overrides):
    with pytest.raises(UserError) as error:
        config.load(path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_stand():
    assert config.load() == config.Config() and config.load().asynchronous


def test_the_file_goes_over_the_defaults_and_set_over_the_file(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('[train]\nepochs = 7\nbatch = 16\n[data]\nset = "mnist"\n')
    loaded = config.load(file, ["train.epochs=9", "optimizer.learning_rate=1"])
    assert (loaded.train.epochs, loaded.train.batch, loaded.data.set) == (9, 16, "mnist")
    assert loaded.optimizer.learning_rate == 1.0 and isinstance(loaded.optimizer.learning_rate, float)


def test_set_takes_toml_values_and_bare_words():
    loaded = config.load(
        None,
        [
            "data.set=fashion",
            'run.name="a b"',
            "consistency.staleness=inf",
            'layout.place.server=["big-*"]',
            'inject.faults=["kill rank=1 at=push", "slow rank=2 factor=3"]',
            "consistency.staleness=2",
        ],
    )
    assert (loaded.data.set, loaded.run.name, loaded.consistency.staleness) == ("fashion", "a b", 2.0)
    assert loaded.layout.place == {"server": ["big-*"]} and len(loaded.inject.faults) == 2
    assert not loaded.asynchronous


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epoch=3", "--set: unknown key train.epoch; did you mean train.epochs?"),
        ("trian.epochs=3", "--set: unknown key trian; did you mean train?"),
        (
            "train.zzz=3",
            "--set: unknown key train.zzz; allowed: batch, epochs, metrics, monitor, monitor_mode, patience, "
            "target, on_divergence, test",
        ),
        ("train.epochs=many", "--set: train.epochs = 'many': expected a whole number"),
        ("train.epochs=2.5", "--set: train.epochs = 2.5: expected a whole number"),
        ("train.epochs=true", "--set: train.epochs = True: expected a whole number"),
        ("optimizer.learning_rate=fast", "--set: optimizer.learning_rate = 'fast': expected a number"),
        ("data.set=3", "--set: data.set = 3: expected a string"),
        ("inject.faults=kill", "--set: inject.faults = 'kill': expected a list"),
        ("inject.faults=[1]", "--set: inject.faults = [1]: expected a list"),
        ("layout.place=here", "--set: layout.place = 'here': expected a table"),
        ("train.batch=0", "--set: train.batch = 0: must be at least 1"),
        ("optimizer.learning_rate=nan", "--set: optimizer.learning_rate = nan: must be at least 0"),
        ("data.validation=0.9", "--set: data.validation = 0.9: must be between 0 and 0.5"),
        (
            "optimizer.schedule=sine",
            "--set: optimizer.schedule = 'sine': must be one of constant, step, cosine, linear, polynomial, one_cycle, "
            "plateau",
        ),
        (
            "optimizer.milestones=[2]",
            'optimizer.milestones = [2]: only optimizer.schedule = "step" has milestones, not "cosine"',
        ),
        ("consistency.staleness=1.5", "consistency.staleness = 1.5: must be a whole number or inf"),
        (
            "optimizer.decay=40",
            "optimizer.decay = 40: with optimizer.learning_rate = 0.03 a step leaves nothing of a weight; "
            "learning_rate * decay must be below 1",
        ),
        ("layout.place.cook=['h']", "layout.place.cook: unknown role; allowed: data, worker, server"),
        ("layout.place.server=h", "layout.place.server = 'h': expected a list of host patterns"),
        ("train.epochs", "--set train.epochs: expected section.key=value, e.g. --set train.epochs=3"),
        ("epochs=3", "--set epochs=3: expected section.key=value, e.g. --set train.epochs=3"),
        ("train.batch.size=3", "--set: train.batch = {'size': 3}: expected a whole number"),
    ],
)
def test_mistakes_are_named(override, said):
    assert complaint(None, override) == said


@pytest.mark.parametrize(
    ("given", "allowed"), [("kind='adagrad'", "'momentum'"), ("momentum=0.9", "0.0"), ("decay=0.001", "0.0")]
)
def test_what_workers_that_step_would_ignore_is_refused(given, allowed):
    said = complaint(None, "optimizer.where=worker", f"optimizer.{given}")
    assert said.startswith(f"optimizer.{given.replace('=', ' = ')}: workers take plain steps")
    assert said.endswith(f'it must be {allowed}, or set optimizer.where = "server"')
    assert config.load(None, ["optimizer.where=worker", "optimizer.ema=0.1"]).optimizer.ema == 0.1


@pytest.mark.parametrize(
    ("section", "key", "said"),
    [
        ("optimiser", "rate", "optimiser is now optimizer, optimizer.rate is now optimizer.learning_rate"),
        ("optimiser", "momentum", "optimiser is now optimizer"),
        ("optimizer", "rate", "optimizer.rate is now optimizer.learning_rate"),
        ("optimizer", "warm_up", "optimizer.warm_up is now optimizer.warmup"),
        ("optimizer", "average", "optimizer.average is now optimizer.ema"),
        ("data.transform", "normalise", "data.transform.normalise is now data.transform.normalize"),
    ],
)
@pytest.mark.parametrize("source", ["file", "set", "dict", "toml"])
def test_a_former_key_is_refused_with_its_present_name(section, key, said, source, tmp_path):
    text = f"[{section}]\n{key} = 0\n"
    file = tmp_path / "former.toml"
    file.write_text(text)
    given = {
        "file": lambda: config.load(file),
        "set": lambda: config.load(None, [f"{section}.{key}=0"]),
        "dict": lambda: config.load(tomllib.loads(text)),
        "toml": lambda: config.from_toml(text, "weights.h5"),
    }
    name = {"file": str(file), "set": "--set", "dict": "config", "toml": "weights.h5"}
    with pytest.raises(UserError) as error:
        given[source]()
    assert str(error.value) == f"{name[source]}: {said}; use the new name"


def test_every_present_name_is_a_key():
    sections = {field.name for field in dataclasses.fields(config.Config)}
    assert set(reading.RENAMED.values()) <= sections | set(_keys("", config.Config()))


def test_a_section_given_as_a_value_is_named(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("train = 3\n")
    assert complaint(file).startswith(f"{file}: train = 3: a section")


def test_files_that_cannot_be_read_are_named(tmp_path):
    missing, broken, binary = tmp_path / "missing.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("[train\n")
    binary.write_bytes(b"\xff\xfe\x00")
    assert complaint(missing).startswith(f"config {missing}: No such file or directory; give a TOML file, or one of ")
    assert complaint(broken).startswith(f"config {broken}: not TOML: ")
    assert complaint(binary).startswith(f"config {binary}: not TOML: ")
    assert complaint(tmp_path).startswith(f"config {tmp_path}: Is a directory")


def _keys(prefix, section):
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _keys(f"{prefix}{field.name}.", value)
        else:
            yield prefix + field.name


def test_every_field_is_documented_in_sentences():
    documented = {key: text for key, _, text in config.documentation()}
    assert list(documented) == list(_keys("", config.Config()))
    for key, text in documented.items():
        assert text[0].isupper() and text.endswith(".") and not set("\n|") & set(text), key


def test_what_is_written_reads_back_the_same(tmp_path):
    overrides = ["consistency.staleness=3", "run.name=x", "layout.place.data=['a', 'b']", "data.validation=0.1"]
    for given in ([], overrides):
        file = tmp_path / "config.toml"
        file.write_text(config.to_toml(config.load(None, given)))
        assert config.load(file) == config.load(None, given)
    assert math.isinf(tomllib.loads(config.to_toml(config.Config()))["consistency"]["staleness"])
