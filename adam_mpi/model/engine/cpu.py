"""Detect what kernels depend on: the float32 in a vector register, the number of registers, the caches."""

import platform
from pathlib import Path

import llvmlite.binding as llvm


def features() -> dict[str, bool]:
    """Return the features of this CPU as LLVM names them; empty where LLVM does not know them."""
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


def lanes() -> int:
    """Return the images in a block: AVX-512 has 16 float32 in a register, AVX2 8, NEON and everything else 4."""
    have = features()
    if have.get("avx512f"):
        return 16
    return 8 if have.get("avx2") else 4


def registers() -> int:
    """Return the number of vector registers: 32 with AVX-512 and NEON, else 16."""
    many = features().get("avx512f") or platform.machine().lower() in ("aarch64", "arm64")
    return 32 if many else 16


def x86() -> bool:
    """Return whether this is an x86 CPU of 64 bits."""
    return platform.machine().lower() in ("x86_64", "amd64")


def caches() -> dict[str, int]:
    """Return the bytes of the first core's data caches by level ("L2"); empty where the system does not report them."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction" and size.endswith("K"):
            found[f"L{level}"] = 1024 * int(size[:-1])
    return found


def name() -> str:
    """Return a name of the CPU that differs wherever compiled code does."""
    wanted = sorted(feature for feature, there in features().items() if there)
    return " ".join([llvm.get_default_triple(), llvm.get_host_cpu_name(), *wanted])
