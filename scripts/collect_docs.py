#!/usr/bin/env python
"""Collect the pages of the documentation site in build/docs, and check that public names have docstrings.

Pages are kept where a reader of the repository looks for them. The site has them in one folder, so links between them
are rewritten. A link to a file that is not a page (a program, a data file) becomes plain text.
"""

import inspect
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import adam_mpi  # noqa: E402

TARGET = ROOT / "build" / "docs"
# Pages outside of docs/, and where they are on the site.
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
    "CHANGELOG.md": "changelog.md",
    "slurm/README.md": "howto/slurm.md",
    "data/README.md": "howto/data.md",
    "examples/README.md": "howto/examples.md",
}
SHOWN = (".md", ".svg", ".png", ".css")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)?(#[^)]*)?\)")


def places() -> dict[Path, Path]:
    """Return where each page, picture and style sheet of the repository is on the site, relative to both roots."""
    own = {path.relative_to(ROOT): path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*")}
    pages = {source: target for source, target in own.items() if source.suffix in SHOWN}
    return pages | {Path(source): Path(target) for source, target in MOVED.items() if (ROOT / source).exists()}


def rewrite(text: str, source: Path, known: dict[Path, Path]) -> str:
    """Return `text`, the page at `source`, with its links as they must be on the site."""

    def link(found: re.Match[str]) -> str:
        picture, label, target, anchor = found.groups(default="")
        if not target or target.startswith(("http:", "https:", "mailto:")):
            return found[0]
        file = Path(os.path.normpath(source.parent / target))
        if file in known:
            return f"{picture}[{label}]({os.path.relpath(known[file], known[source].parent)}{anchor})"
        if not (ROOT / file).exists():
            raise SystemExit(f"{source}: {target} does not exist")
        return label

    return LINK.sub(link, text)


def undocumented() -> Iterator[str]:
    """Yield the public names of the package, and of its public classes, that have no docstring."""
    for name in adam_mpi.__all__:
        value = getattr(adam_mpi, name)
        if not (inspect.isclass(value) or callable(value)):
            continue
        if not inspect.getdoc(value):
            yield f"adam_mpi.{name}"
        for member, function in vars(value).items() if inspect.isclass(value) else ():
            is_public = not member.startswith("_") and (callable(function) or isinstance(function, property))
            if is_public and not inspect.getdoc(function):
                yield f"adam_mpi.{name}.{member}"


def collect() -> None:
    """Write all pages, pictures and style sheets of the site into build/docs."""
    shutil.rmtree(TARGET, ignore_errors=True)
    known = places()
    for source, target in known.items():
        (TARGET / target).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            (TARGET / target).write_text(rewrite((ROOT / source).read_text(), source, known))
        else:
            shutil.copyfile(ROOT / source, TARGET / target)


if __name__ == "__main__":
    if missing := sorted(undocumented()):
        raise SystemExit(f"no docstring: {', '.join(missing)}")
    collect()
