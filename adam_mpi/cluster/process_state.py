"""Whether a process is stopped by a signal or frozen by a control group, as the kernel reports it.

Standard library only: the sentinel, which starts without installed packages, uses it.
"""

from contextlib import suppress
from pathlib import Path


def halted_state(pid: int) -> str:
    """Return "stopped" or "frozen" for a process that is, else ""; also "" where there is no /proc."""
    try:
        # The name, in parentheses, may contain spaces and parentheses.
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return "stopped"
    except OSError:
        return ""
    return "frozen" if _is_frozen(pid) else ""


def _is_frozen(pid: int) -> bool:
    """Return whether a cgroup freezer, of version 1 or 2, holds `pid`, whose state then looks like sleep."""
    with suppress(OSError):
        freezers = _freezers()
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and "frozen 1" in _read(freezers.get("cgroup2"), path, "cgroup.events"):
                return True
            version_1 = "freezer" in controllers.split(",")
            if version_1 and "FROZEN" in _read(freezers.get("freezer"), path, "freezer.state"):
                return True
    return False


def _freezers() -> dict[str, tuple[str, str]]:
    """Return (group at the mount point, mount point) of the cgroup hierarchies that have a freezer, by kind."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup2":
            found["cgroup2"] = root, mount
        elif kind == "cgroup" and "freezer" in options.split(","):
            found["freezer"] = root, mount
    return found


def _read(hierarchy: tuple[str, str] | None, path: str, name: str) -> str:
    """Return the content of file `name` of the control group `path`, or "" where it is not visible."""
    if hierarchy is None:
        return ""
    root, mount = hierarchy
    with suppress(OSError):
        return Path(mount, path.removeprefix(root.rstrip("/")).lstrip("/"), name).read_text()
    return ""
