"""Who may import whom, read from the sources; and a few other rules that keep the house easy to walk through."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("shapes", "benches", "correctness")
LONGEST_FUNCTION = 49  # lines
FOREIGN = ("torch", "pytest", "_pytest", "pytest_benchmark", "transformer_engine", "transformer_engine_torch")
NAMED_TUPLE = {"_replace", "_asdict", "_fields", "_make"}  # public in spite of their names


@cache
def sources() -> dict[str, ast.Module]:
    """Every Python file by its path from the root."""
    paths = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(paths)}


def imported(tree: ast.AST, everywhere: bool = True) -> Iterator[str]:
    """Modules that a file imports, anywhere in it or only when it is imported itself."""
    for node in ast.walk(tree) if everywhere else at_import(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level) + (node.module or "")


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the file is imported: neither functions' bodies nor what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from at_import(node)


def importers(package: str, among: str, everywhere: bool = True) -> list[str]:
    """Files whose path matches `among` and that import the package or a part of it."""
    return [
        path
        for path, tree in sources().items()
        if re.match(among, path) and any(name.split(".")[0] == package for name in imported(tree, everywhere))
    ]


def test_the_rules_see_the_sources() -> None:
    """Files of each folder are there, and imports are found: an empty list below is no oversight."""
    assert {path.split("/")[0] for path in sources()} >= {*FOLDERS, "conftest.py"}
    assert "benches/bench_gemms.py" in importers("pytest", "benches/")
    assert "shapes/backends/te.py" in importers("transformer_engine", "")


class TestImports:
    """Data flows one way."""

    def test_imports_are_absolute(self) -> None:
        """So that the rules below see them."""
        assert [path for path, tree in sources().items() for name in imported(tree) if name.startswith(".")] == []

    @pytest.mark.parametrize(
        ("package", "among"),
        [
            pytest.param("benches", "shapes/", id="shapes does not import benches"),
            pytest.param("correctness", "shapes/", id="shapes does not import correctness"),
            pytest.param("correctness", "benches/", id="benches does not import correctness"),
            pytest.param("benches", r"correctness/(?!suite/)", id="accuracy tests do not import benches"),
        ],
    )
    def test_siblings_keep_apart(self, package: str, among: str) -> None:
        """shapes imports neither sibling, and only correctness/suite imports benches."""
        assert importers(package, among) == []

    @pytest.mark.parametrize("among", [r"shapes/(?!backends/te\.py)", "benches/", "correctness/", "conftest"])
    def test_one_file_imports_transformer_engine(self, among: str) -> None:
        """shapes/backends/te.py."""
        assert importers("transformer_engine", among) + importers("transformer_engine_torch", among) == []

    def test_no_other_file_names_transformer_engine_in_code(self) -> None:
        """As an identifier. As a string its name is printed, and device.py asks whether it is installed."""
        named = [
            path
            for path, tree in sources().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id.startswith("transformer_engine")
        ]
        looked_up = [
            path
            for path, tree in sources().items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("find_spec", "import_module", "importorskip", "__import__")
            and "transformer_engine" in "".join(ast.unparse(argument) for argument in node.args)
        ]
        assert set(named) <= {"shapes/backends/te.py"}
        assert set(looked_up) <= {"shapes/backends/te.py", "benches/harness/device.py"}

    def test_torch_is_imported_with_a_file_in_backends_only(self) -> None:
        """Elsewhere in shapes and benches, where it is needed and not before."""
        assert importers("torch", r"(benches|shapes)/(?!backends/)|conftest", everywhere=False) == []

    @pytest.mark.parametrize("package", ["torch", "pytest", "pytest_benchmark"])
    def test_what_reads_results_files_needs_neither_torch_nor_pytest(self, package: str) -> None:
        """The report and the statistics, anywhere in them."""
        parts = (
            r"report/|(gate|noise|baseline|journal)\.py|harness/(medians|kernels|journal)\.py|judging/(?!gatekeeper)"
        )
        assert importers(package, f"benches/({parts})") == []

    @pytest.mark.parametrize(
        ("modules", "heavy"),
        [
            pytest.param("benches.report.__main__ benches.report.plots benches.harness.medians", "torch pytest numpy"),
            pytest.param("benches.harness.plugin benches.conftest benches.harness.stopwatch conftest", "torch numpy"),
            pytest.param("shapes.__main__ shapes.selection shapes.cases shapes.program", "torch pytest numpy"),
        ],
        ids=["report", "harness", "shapes"],
    )
    def test_importing_a_part_imports_nothing_heavy(self, modules: str, heavy: str) -> None:
        """In a fresh interpreter, with everything that these files import in turn."""
        script = f"""
import sys
for name in {modules.split()!r}:
    __import__(name)
print(sorted(set({heavy.split()!r}) & sys.modules.keys()))
"""
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, timeout=60)
        assert (done.stdout, done.stderr) == ("[]\n", "")


class TestNames:
    """What files and things are called."""

    def test_no_module_is_named_like_a_standard_one(self) -> None:
        """`statistics` or `profile` would hide Python's own from whoever runs a file by itself."""
        stems = {path: Path(path).stem for path in sources()} | {folder: folder for folder in FOLDERS}
        assert [path for path, stem in stems.items() if stem in sys.stdlib_module_names] == []

    def test_every_folder_with_python_files_is_a_package(self) -> None:
        """With an __init__.py, so that equal file names do not clash."""
        folders = {str(Path(path).parent) for path in sources() if "/" in path}
        assert [folder for folder in folders if f"{folder}/__init__.py" not in sources()] == []

    def test_private_names_of_others_are_not_used_but_for_these(self) -> None:
        """torch's spin kernel, three facts about a tensor of TE, and the level of what it logs: there is no public way.

        A name is private and somebody else's if it begins with an underscore and the file does not define it.
        """
        used = {
            (path, name)
            for path, tree in sources().items()
            for own in [defined(tree)]
            for name in asked_for(tree)
            if re.match(r"_[^_]", name) and name not in NAMED_TUPLE | own
        }
        assert used == {
            ("benches/harness/timeline.py", "_sleep"),
            ("shapes/backends/te.py", "_fp8_dtype"),
            ("shapes/backends/te.py", "_is_2D_scaled"),
            ("shapes/backends/te.py", "_log_level"),
            ("shapes/backends/te.py", "_quantizer"),
        }

    def test_nothing_private_is_imported_from_others_but_for_these(self) -> None:
        """PyTorch documents its module for seeing every operation; TE tells its choice of an attention nowhere else."""
        names = [
            f"{path}: {name}"
            for path, tree in sources().items()
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            for name in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
            if name.split(".")[0] in FOREIGN and any(re.match(r"_[^_]", part) for part in name.split("."))
        ]
        attention = "transformer_engine.pytorch.attention.dot_product_attention"
        assert names == [
            "shapes/backends/executed.py: torch.utils._python_dispatch.TorchDispatchMode",
            f"shapes/backends/te.py: {attention}._attention_backends",
        ]


def asked_for(tree: ast.AST) -> Iterator[str]:
    """Attributes that a file reads, sets or asks for by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield ast.unparse(node.args[1]).strip("'") if isinstance(node.args[1], ast.Constant) else ""


def defined(tree: ast.AST) -> set[str]:
    """Attributes that a file gives: what its classes' bodies define, and what it assigns to as `self.name`."""
    bodies = [member for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for member in node.body]
    methods = {member.name for member in bodies if isinstance(member, ast.FunctionDef)}
    fields = {ast.unparse(member.target) for member in bodies if isinstance(member, ast.AnnAssign)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return methods | fields | {node.attr for node in stored if ast.unparse(node.value) == "self"}


class TestText:
    """What the files contain."""

    def test_no_function_is_longer_than_a_screen(self) -> None:
        """From its def to its last line."""
        lengths = {
            f"{path}: {node.name}": node.end_lineno - node.lineno + 1
            for path, tree in sources().items()
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno
        }
        assert max(lengths.values()) > 5
        assert [name for name, lines in lengths.items() if lines > LONGEST_FUNCTION] == []

    def test_no_file_contains_a_path_of_somebodys_machine(self) -> None:
        """Of a home, a checkout or a scratch folder."""
        pattern = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|mnt|Users|opt|scratch)/\w")
        assert pattern.search("see /home/me"), "the pattern finds what it is for"
        others = [path for kind in ("*.md", "*.ini", "*.toml", "*.cfg", "*.yml") for path in ROOT.glob(kind)]
        files = [*(ROOT / path for path in sources()), *others]
        this = Path(__file__).resolve()
        found = [str(path.relative_to(ROOT)) for path in files if path != this and pattern.search(path.read_text())]
        assert found == []
