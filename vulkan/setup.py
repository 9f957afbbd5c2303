"""Builds the runtime: a C++ library on the headers of TVM's wheels and of Vulkan, loaded by ``kvq_vulkan``.

It is no extension module: it speaks to Python through TVM's registry and depends on no version of Python.
"""

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, SetupError

HERE = Path(__file__).parent
LIBRARY = "kvq_vulkan.dll" if sys.platform == "win32" else "libkvq_vulkan.so"


class BuildRuntime(build_ext):
    """Builds with the headers that are found when the build runs."""

    def get_ext_filename(self, _name: str) -> str:
        return LIBRARY

    def get_export_symbols(self, _extension: Extension) -> list[str]:
        return []

    def build_extension(self, extension: Extension) -> None:
        extension.include_dirs = [str(path) for path in header_directories()]
        try:
            super().build_extension(extension)
        except CompileError as error:
            raise SetupError(
                f"{error}: kvq-vulkan needs a C++17 compiler and the Vulkan headers (Debian: libvulkan-dev)"
            ) from None


class AnyPythonWheel(bdist_wheel):
    """A wheel for a platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def header_directories() -> list[Path]:
    """Headers of TVM and of its FFI, from their wheels; Vulkan's are the compiler's to find."""
    found = []
    for name in ("tvm", "tvm_ffi"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SetupError(f"the package {name} is needed to build kvq-vulkan")
        found.append(Path(spec.origin).parent / "include")
    return found


setup(
    ext_modules=[
        Extension(
            "kvq_vulkan._runtime",
            sources=sorted(str(path.relative_to(HERE)) for path in (HERE / "src").glob("*.cc")),
            language="c++",
            extra_compile_args=["/std:c++17"] if sys.platform == "win32" else ["-std=c++17", "-O2", "-g0"],
        )
    ],
    cmdclass={"build_ext": BuildRuntime, "bdist_wheel": AnyPythonWheel},
)
