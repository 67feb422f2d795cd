"""What the house's rules look for in the source: modules, imports, constants, and the counts that may only fall."""

import ast
import collections
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "meshpar": "meshpar",
    "models": "meshpar.models",
    "checkpoints": "meshpar.checkpoints",
    "launchers": "meshpar.launchers",
}
TORCH_ROOMS = ("meshpar/_torch/", "meshpar/torch/")
PLACEHOLDERS = re.compile(
    "found|place|known|held|own|mine|inside|one|made|kept|most|given|left|told|came|whose|others|both|beside|each"
)


@functools.cache
def sources() -> list[tuple[Path, str]]:
    """Every module of ours: its file and its name."""
    files = [
        (folder, package, path) for folder, package in FOLDERS.items() for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    named = [(path, package, path.relative_to(ROOT / folder).with_suffix("").parts) for folder, package, path in files]
    return [
        (path, ".".join([package, *(part for part in parts if part != "__init__")])) for path, package, parts in named
    ]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(path)))


@functools.cache
def imports(path: Path) -> list[str]:
    """The absolute names that a module imports anywhere, also for types or on first use."""
    gathers = nodes(path) if path.name == "__init__.py" else []
    lazy = [node for node in gathers if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    later = {id(inner) for node in lazy for inner in ast.walk(node)}
    names = []
    for node in nodes(path):
        if id(node) in later:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@functools.cache
def constants(path: Path) -> list[object]:
    """The numbers and texts that a module's code writes; its docstrings are not code."""
    docstrings = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
    negated = [node.operand for node in nodes(path) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)]
    plain = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return plain + [-node.value for node in negated if isinstance(node, ast.Constant)]


def calls(path: Path, *functions: str) -> list[ast.Call]:
    """Calls of functions by these names, as they are or as an attribute."""
    return [
        node
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in functions
    ]


def forget() -> None:
    """Free what is parsed, some hundred MB."""
    for cached in (parsed, nodes, imports, constants):
        cached.cache_clear()


def where(path: Path, node: object = None) -> str:
    return f"{path.relative_to(ROOT)}" + (f":{node.lineno}" if isinstance(node, ast.stmt | ast.expr) else "")


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, _ in sources():
        yield from ((path, node) for node in nodes(path) if isinstance(node, ast.ClassDef))


def lines_of(node: ast.ClassDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class assigns to ``self``, and the fields that it declares."""
    assigned = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    }
    return assigned | {
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def arguments(node: ast.ClassDef) -> int:
    made = [inner for inner in node.body if isinstance(inner, ast.FunctionDef) and inner.name == "__init__"]
    return max((len(inner.args.args) + len(inner.args.kwonlyargs) - 1 for inner in made), default=0)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def defined() -> set[str]:
    """Names that our own source gives to anything."""
    names = set()
    for path, _ in sources():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return names


def private_names(path: Path) -> set[str]:
    """Private names of other packages that a file imports, reads by a path, or asks an object for."""
    imported = [name for name in imports(path) if name.split(".")[0] in ("torch", "transformers", "accelerate")]
    names = {name for name in imported if any(map(is_private, name.split(".")))}
    names -= {name for name in names if name.rpartition(".")[0] in names}
    asked = [node.args[1] for node in calls(path, "getattr", "hasattr", "setattr", "delattr") if len(node.args) > 1]
    read = [node.value for node in asked if isinstance(node, ast.Constant)]
    # os._exit and sys._getframe are documented.
    paths = [node for node in nodes(path) if isinstance(node, ast.Attribute)]
    read += [node.attr for node in paths if ast.unparse(node.value) not in ("os", "sys")]
    return names | {name for name in read if is_private(name) and name not in defined() and name != "_replace"}


def others_private_names() -> list[str]:
    """Outside of the room of torch's, and of that of transformers'."""
    rooms = (*TORCH_ROOMS, "models/huggingface")
    paths = [path for path, _ in sources() if not where(path).startswith(rooms)]
    return [f"{where(path)}: {name}" for path in paths for name in sorted(private_names(path))]


def double_names() -> list[str]:
    homes: dict[str, set[str]] = collections.defaultdict(set)
    for path, node in classes():
        homes[node.name.lstrip("_")].add(where(path))
    return [f"{name}: {', '.join(sorted(files))}" for name, files in sorted(homes.items()) if len(files) > 1]


def files_with(pattern: str, *homes: str) -> list[str]:
    """Files outside of ``homes`` whose text has a pattern."""
    look = re.compile(pattern, re.MULTILINE).search
    return [where(path) for path, _ in sources() if not where(path).startswith(homes) and look(path.read_text())]


def imports_by_text() -> list[str]:
    """Loads of our own modules by a text; names that a package declares are loaded by `process.imports`."""
    return [
        f"{where(path, node)} {ast.unparse(node)[:60]}"
        for path, _ in sources()
        for node in calls(path, "imported", "import_module", "__import__")
        if node.args and any(str(getattr(part, "value", "")).startswith("meshpar") for part in ast.walk(node.args[0]))
    ]


def wrapped_code() -> list[str]:
    """Lines on which wrapped code ends, with a comment: above the line it would need no wrapping."""
    look = re.compile(r"^\s*\)\s*(?:\.\w+\(.*\))?\s*#|^\s*\):\s*#").search
    return [
        f"{where(path)}:{number}"
        for path, _ in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if look(line)
    ]


COUNTS: dict[str, Callable[[], list[str]]] = {
    "classes over 300 lines": lambda: [
        f"{where(path)}:{node.name} {lines_of(node)}" for path, node in classes() if lines_of(node) > 300
    ],
    "classes over 15 attributes": lambda: [
        f"{where(path)}:{node.name} {len(attributes(node))}"
        for path, node in classes()
        if not is_dataclass(node) and len(attributes(node)) > 15
    ],
    "classes over 10 constructor arguments": lambda: [
        f"{where(path)}:{node.name} {arguments(node)}"
        for path, node in classes()
        if not is_dataclass(node) and arguments(node) > 10
    ],
    "class names with several meanings": double_names,
    "files that read a record on the module": lambda: files_with(r"\bapplied\(|_meshpar_applied"),
    "files that ask whether ranks are simulated": lambda: files_with(
        r"\bis_simulated\(|[!=]= \"fake\"", "meshpar/forecasting/", "meshpar/core/runtime.py"
    ),
    "imports by text": imports_by_text,
    "private names of others outside their room": others_private_names,
    "code wrapped around a trailing comment": wrapped_code,
    "variables without a noun": lambda: [
        f"{where(path, node)} {node.id}"
        for path, _ in sources()
        for node in nodes(path)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and PLACEHOLDERS.fullmatch(node.id)
    ],
    "files loose in meshpar": lambda: [where(path) for path, _ in sources() if path.parent == ROOT / "meshpar"],
}
"""What the house counts, and how it finds each; tests/core/test_house.py says how many there may be."""
