"""What the architecture tests look at: the files of this repository, and the imports of its modules."""

import ast
import fnmatch
import functools
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"rfork": ROOT / "python/rfork", "sglang_rfork": ROOT / "python/sglang"}


@functools.cache
def files() -> tuple[Path, ...]:
    """Return the files that are, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout.decode().split("\0")
    return tuple(path for name in sorted(set(names)) if name and (path := ROOT / name).is_file())


@functools.cache
def text(path: Path) -> str | None:
    """Return a file's text, or None if it is not text."""
    try:
        return path.read_text()
    except UnicodeDecodeError:
        return None


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def _ignored_by_docker() -> tuple[tuple[str, bool], ...]:
    """Patterns of .dockerignore and whether each takes back: `*`, a top-level name, or `**/` and a name."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    rules = tuple((line.removeprefix("!"), line.startswith("!")) for line in lines)
    assert all("/" not in pattern.removeprefix("**/") for pattern, _ in rules), "a form that `travels` does not know"
    return rules


def travels(path: Path) -> bool:
    """Whether `COPY .` of an image takes it. The last rule that means it, or a folder that it is in, decides."""
    parts = path.relative_to(ROOT).parts
    taken = True
    for pattern, takes_back in _ignored_by_docker():
        names = parts if pattern.startswith("**/") else parts[:1]
        if any(fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names):
            taken = takes_back
    return taken


@dataclass(frozen=True)
class Module:
    name: str
    path: Path

    @functools.cached_property
    def imports(self) -> frozenset[str]:
        """The modules that it imports anywhere, by full name; not those that only the type checker sees."""
        found: set[str] = set()
        package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
        for node in _outside_type_checking(ast.parse(self.path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, *([base] if base else [])])
                found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        return frozenset(found)

    def imports_package(self, package: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for name in self.imports)


def _outside_type_checking(tree: ast.AST) -> list[ast.AST]:
    nodes: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
            continue
        nodes.append(node)
        waiting += ast.iter_child_nodes(node)
    return nodes


@functools.cache
def modules(package: str) -> tuple[Module, ...]:
    """Return the modules of one of `PACKAGES`."""
    folder = PACKAGES[package]
    found = []
    for path in files():
        if path.suffix == ".py" and path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            found.append(Module(name, path))
    assert found, f"no module in {folder}"
    return tuple(found)
