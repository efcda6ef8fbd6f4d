"""Builds the C++ kernels of `kernels/cpu` for CPUs; all else about the package stands in setup.cfg.

They are an extra: without a C++ compiler (GCC or Clang), or on other machines than x86-64 Linux, the package installs without them.
"""

import importlib.util
import pathlib
import platform
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

OLDEST = "0x030B0000"  # Python whose stable interface the module keeps to: one build serves all later ones
FOLDER = pathlib.Path("kernels/cpu")


def extensions() -> list[Extension]:
    xla = importlib.util.find_spec("jaxlib")  # its headers; not imported, since any release of it builds
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or xla is None:
        return []
    (folder,) = xla.submodule_search_locations
    return [
        Extension(
            "kernels.cpu.native",
            sources=sorted(map(str, FOLDER.glob("*.cc"))),
            depends=sorted(str(path) for kind in ("*.h", "*.inc") for path in FOLDER.glob(kind)),
            language="c++",
            define_macros=[("Py_LIMITED_API", OLDEST)] if stable() else [],
            py_limited_api=stable(),
            # No -march: `module.cc` looks at the CPU it runs on. XLA's headers are the system's, so that their warnings stay away, as does
            # what GCC says of its own vector intrinsics (maybe-uninitialized).
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fvisibility=hidden",
                "-Wno-maybe-uninitialized",
                "-isystem",
                f"{folder}/include",
            ],
            optional=True,
        )
    ]


def stable() -> bool:
    """Whether this Python has the stable interface: those without a global lock don't."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


class Build(build_ext):
    """Compiles several files at once."""

    def build_extension(self, ext: Extension) -> None:
        compile_some = self.compiler.compile

        def compile_each(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor() as pool:
                found = [pool.submit(compile_some, [source], **options) for source in sources]
            return [name for each in found for name in each.result()]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_some


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if stable() and extensions() else {},
)
