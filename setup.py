"""The optional compiled part; everything else about the package is in pyproject.toml."""

import sys

from setuptools import Extension, setup

# Without a compiler, or with one that lacks GCC's vector types, the build goes on and the package takes its pure torch
# path.  It is a plain shared library for ctypes, without Python or torch headers; the instruction set is chosen when it
# runs, so there is no -march here.
unix = sys.platform != "win32"
native = Extension(
    "gsoftmax.kernels._native",
    ["src/gsoftmax/kernels/native.c"],
    extra_compile_args=["-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"] if unix else [],
    libraries=["m", "pthread"] if unix else [],
    optional=True,
)

setup(ext_modules=[native])
