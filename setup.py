"""The optional compiled part; everything else about the package is in pyproject.toml."""

import gzip
import os
import sys
import tarfile
import zlib
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

# Without a compiler, or with one that lacks GCC's vector types, the build goes on and the package takes its pure torch
# path.  It is a plain shared library for ctypes, without Python or torch headers; the instruction set is chosen when it
# runs, so there is no -march here.  SOURCE lets native.py see whether a library was made from the C files beside it.
unix = sys.platform != "win32"
sources = [Path("src/gsoftmax/kernels", name) for name in ("native.c", "native_terms.h")]
exact = ["-O3", "-fno-fast-math", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
exact += ["-g0"]  # debugging information has the folder of the build in it
native = Extension(
    "gsoftmax.kernels._native",
    [str(sources[0])],
    depends=[str(sources[1])],
    define_macros=[("SOURCE", f"{zlib.crc32(b''.join(v.read_bytes() for v in sources))}u")],
    extra_compile_args=exact if unix else [],
    libraries=["m", "pthread"] if unix else [],
    optional=True,
)


class ReproducibleSdist(sdist):
    """With SOURCE_DATE_EPOCH the archive depends on the content of its files alone."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if epoch is None or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        name = f"{base_name}.tar.gz"
        with (
            open(name, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in sorted(Path(base_dir).rglob("*")):
                archive.add(path, recursive=False, filter=plain)
        return name


class ReproducibleWheel(bdist_wheel):
    """Its files have the same permissions whatever the umask and those of the sources are."""

    def write_wheelfile(self, *args, **options):  # the last file before they are packed
        super().write_wheelfile(*args, **options)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


# Always compiled again: a library left over from another version may well be newer than the source by its date.
commands = {"sdist": ReproducibleSdist, "bdist_wheel": ReproducibleWheel}
setup(ext_modules=[native], options={"build_ext": {"force": True}}, cmdclass=commands)
