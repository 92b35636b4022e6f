"""The layers of the package: a module imports only from its own layer's folder and from lower layers."""

import ast
from pathlib import Path

import adam_mpi

PACKAGE = Path(adam_mpi.__file__).parent

# From the bottom to the top. Folders of one layer do not import each other: that keeps the three roles apart.
LAYERS = [
    {"base"},
    {"config"},
    {"cluster"},
    {"model"},
    {"optimizer"},
    {"sharding"},
    {"transport"},
    {"checkpoint"},
    {"data", "server", "worker"},
    {"planning"},
    {"monitor"},
    {"runtime"},
    {"inference"},
    {"simulate"},
    {"sweep"},
    {"report"},
    {"parameter_server"},
    {"api", "nn", "options"},
    {"ready_models"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imported(text):
    """Yield the folder or top-level module of adam_mpi that each import in the module `text` names."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("adam_mpi."))
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "adam_mpi"):
            assert not node.level, f"line {node.lineno}: relative import; name the module in full"
            folders = (node.module or "").split(".")[1:2]
            yield from folders or (alias.name for alias in node.names)


def violations(name, text):
    """Return what the module `text` of the folder or top-level module `name` imports, but must not."""
    if name not in LEVEL:
        return [f"{name} is in no layer: add it to LAYERS"]
    wrong = [other for other in imported(text) if other != name and LEVEL.get(other, len(LAYERS)) >= LEVEL[name]]
    return [f"{name} imports {other}" for other in wrong]


def test_imports_point_downward():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if wrong := violations(place.with_suffix("").parts[0], path.read_text()):
            found[str(place)] = wrong
    assert not found


def test_every_folder_and_module_of_a_layer_exists():
    present = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert set(LEVEL) == present


def test_an_import_that_points_upward_or_sideways_is_found():
    assert violations("config", "from adam_mpi.base import text\nimport numpy\nimport adam_mpi.config.fields") == []
    assert violations("config", "def f():\n    from adam_mpi.cluster.world import World") == ["config imports cluster"]
    assert violations("server", "import adam_mpi.worker.worker") == ["server imports worker"]
    assert violations("worker", "from adam_mpi import config, data") == ["worker imports data"]
    assert violations("base", "from adam_mpi.kitchen import pot") == ["base imports kitchen"]
    assert violations("kitchen", "") == ["kitchen is in no layer: add it to LAYERS"]
