"""Dependencies point one way, and what only runs a library needs no compiler."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import kvq

ROOT = Path(kvq.__file__).parent

#: Units (modules and packages directly under ``kvq``) by storey. A unit uses its own storey and those below.
STOREYS = (
    {"errors", "cache_dir", "cpu_features", "gpu_features", "sizes", "version", "__init__"},
    {"layout", "config", "presets"},
    {"model", "loader", "quantization", "passes", "schedules", "runtime", "tokenizer"},
    {
        *(
            "convert",
            "gen_config",
            "compiler",
            "packaged_models",
            "hub",
            "model_source",
            "build",
            "memory",
            "memory_budget",
            "engine",
        ),
        *("eval", "bench", "compare", "inspect_cache", "serve", "devices"),
    },
    {"cli", "__main__"},
)
RANK = {unit: rank for rank, units in enumerate(STOREYS) for unit in units}

#: What runs a library, and what makes one. ``kvq.build`` joins the two and is imported where it is needed.
RUNS = ("runtime", "engine")
COMPILES = ("kvq.compiler", "kvq.passes", "kvq.schedules", "kvq.model", "tvm.relax", "tvm.tirx", "tvm.s_tir")
#: The list of a model's weights is plain data and belongs to both.
PLAIN = ("kvq.model.parameters", "kvq.model.families")

#: Third-party packages that a unit may name; anything else would be an undeclared dependency.
DECLARED = {
    *(
        "tvm",
        "tvm_ffi",
        "numpy",
        "ml_dtypes",
        "safetensors",
        "gguf",
        "tokenizers",
        "jinja2",
        "pydantic",
        "rich",
    ),
    "kvq_vulkan",
    *("fastapi", "uvicorn", "prometheus_client", "llguidance", "matplotlib", "jsonschema"),
    *("huggingface_hub", "starlette", "httpx", "httptools", "markupsafe"),
}


def source_files() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, package: str) -> set[str]:
    """Full names imported anywhere in a module of ``package``, ``if TYPE_CHECKING`` apart."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                parents = package.split(".")
                base = [*parents[: len(parents) - node.level + 1], *base]
            found.update(".".join([*base, alias.name]) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def imports_of(path: Path) -> set[str]:
    return imports(path.read_text(), ".".join(path.relative_to(ROOT.parent).parent.parts))


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def unit_of(name: str) -> str:
    """The unit that an imported full name ``kvq.a.b`` belongs to."""
    parts = name.split(".")
    if len(parts) < 2:
        return "__init__"
    unit = parts[1]
    is_unit = (ROOT / unit).is_dir() or (ROOT / f"{unit}.py").exists()
    return unit if is_unit else "__init__"


@pytest.fixture(scope="module")
def edges() -> dict[str, dict[str, str]]:
    """Unit -> unit it imports -> one ``file: name`` that shows it."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for path in source_files():
        importer = unit_of(module_name(path)) if path != ROOT / "__init__.py" else "__init__"
        for name in imports_of(path):
            if name.split(".")[0] == "kvq" and unit_of(name) != importer:
                found[importer].setdefault(unit_of(name), f"{path.relative_to(ROOT)}: {name}")
    return dict(found)


def test_every_unit_has_a_storey() -> None:
    units = {unit_of(module_name(path)) for path in source_files()}
    assert units <= set(RANK), f"give these a storey in STOREYS: {sorted(units - set(RANK))}"


def test_dependencies_point_down(edges: dict[str, dict[str, str]]) -> None:
    upward = [
        shown
        for importer, used in edges.items()
        for unit, shown in used.items()
        if importer != "__init__" and RANK[unit] > RANK[importer]
    ]
    assert not upward


def test_no_cycles(edges: dict[str, dict[str, str]]) -> None:
    def walk(unit: str, trail: tuple[str, ...]) -> None:
        assert unit not in trail, " -> ".join([*trail[trail.index(unit) :], unit])
        for used in edges.get(unit, {}):
            if used != "__init__":
                walk(used, (*trail, unit))

    for unit in edges:
        if unit != "__init__":
            walk(unit, ())


@pytest.mark.parametrize("unit", RUNS)
def test_what_runs_a_library_names_no_compiler(unit: str) -> None:
    files = sorted((ROOT / unit).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports_of(path)
        if under(name, COMPILES) and not under(name, PLAIN)
    ]
    assert not wrong


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_third_party_imports_are_declared(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert tops - set(sys.stdlib_module_names) - {"kvq"} <= DECLARED


def test_the_walk_sees_what_it_should() -> None:
    """The checks above rest on ``imports``: it must see nested, plain and relative imports."""
    source = """
import os.path
from .a import b
from ..c import d
def f():
    import tvm.relax
if TYPE_CHECKING:
    import hidden
"""
    assert imports(source, "kvq.runtime") == {"os.path", "kvq.runtime.a.b", "kvq.c.d", "tvm.relax"}


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after running ``code``."""
    report = f"{code}\nimport sys; print('MODULES', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(out.stdout.rpartition("MODULES")[2].split())


HELP = """
import contextlib
from kvq.cli.main import main
with contextlib.suppress(SystemExit):
    main(["--help"])
"""


@pytest.mark.parametrize("code", ["import kvq", HELP], ids=["import kvq", "kvq --help"])
def test_starting_is_light(code: str) -> None:
    loaded = modules_after(code)
    assert "kvq" in loaded
    assert not loaded & {"tvm", "tvm_ffi", "tokenizers", "gguf", "jinja2", "safetensors"}
    if code == "import kvq":
        assert not loaded & {"numpy", "pydantic", "rich"}


def test_loading_the_engine_loads_no_compiler() -> None:
    loaded = modules_after("import kvq.engine, kvq.runtime.library")
    ours = tuple(name for name in COMPILES if name.startswith("kvq."))
    # ``import tvm`` itself loads tvm.relax where the compiler library is installed.
    assert not {name for name in loaded if under(name, ours) and not under(name, (*PLAIN, "kvq.model"))}
    assert not {name for name in loaded if name.startswith("kvq.model.") and not under(name, PLAIN)}
