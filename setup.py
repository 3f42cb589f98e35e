"""The optional compiled part; everything else about the package is in pyproject.toml."""

import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup

# Without a compiler, or with one that lacks GCC's vector types, the build goes on and the package takes its pure torch
# path.  It is a plain shared library for ctypes, without Python or torch headers; the instruction set is chosen when it
# runs, so there is no -march here.  SOURCE lets native.py see whether a library was made from the native.c beside it.
unix = sys.platform != "win32"
source = "src/gsoftmax/kernels/native.c"
exact = ["-O3", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
native = Extension(
    "gsoftmax.kernels._native",
    [source],
    define_macros=[("SOURCE", f"{zlib.crc32(Path(source).read_bytes())}u")],
    extra_compile_args=exact if unix else [],
    libraries=["m", "pthread"] if unix else [],
    optional=True,
)

# Always compiled again: a library left over from another version may well be newer than the source by its date.
setup(ext_modules=[native], options={"build_ext": {"force": True}})
