"""The house keeps its order: imports point one way, and no text leaks where it was written."""

import ast
import functools
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sao_jax"

# A module may import lower ranks and its own part; parts of equal rank do not know each other.
RANKS = {
  "types": 0,
  "bounds": 0,
  "memory": 0,
  "outcome": 0,
  "config": 1,
  "checks": 2,
  "loader": 3,
  "latex": 2,
  "lexicon": 1,
  "kernels": 2,
  "optim": 2,
  "sharding": 2,
  "models": 3,
  "data": 3,
  "envs": 3,
  "rollout": 4,
  "train": 5,
  "plan": 6,
  "cli": 6,
}
# Which part may import a package that has no business elsewhere.
ONLY_IN = {"jetstream": "rollout", "gguf": "models", "sympy": "envs", "rich": "train"}
NOWHERE = {"tensorflow", "torch", "seqio", "clu", "transformers"}


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> list[pathlib.Path]:
  return sorted(PACKAGE.rglob("*.py"))


def part_of(path: pathlib.Path) -> str:
  """``sao_jax/train/sao.py`` → train, ``sao_jax/cli.py`` → cli, ``sao_jax/__init__.py`` → ''."""
  name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
  return "" if name == "__init__" else name


def imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
  """(line, dotted name) of every import, also those inside functions."""
  for node in ast.walk(parse(path)):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}:{node.lineno}: relative import"
      module = node.module or ""
      if module == "sao_jax":
        yield from ((node.lineno, f"sao_jax.{alias.name}") for alias in node.names)
      else:
        yield node.lineno, module


def broken_order(path: pathlib.Path) -> list[str]:
  part = part_of(path)
  problems = []
  for line, name in imports(path):
    if not name.startswith("sao_jax."):
      continue
    other = name.split(".")[1]
    if other not in RANKS or other == part:
      continue  # an attribute of the package itself, or inside one part
    if part == "kernels" and other == "config":
      problems.append(f"{path.name}:{line}: kernels import no config")
    elif not part or RANKS[other] >= RANKS[part]:
      problems.append(f"{path.relative_to(ROOT)}:{line}: {part or 'sao_jax'} imports {other}")
  return problems


def test_every_module_has_a_rank():
  assert {part_of(path) for path in modules()} - {""} <= set(RANKS)


def test_imports_point_one_way():
  assert [problem for path in modules() for problem in broken_order(path)] == []


def test_the_check_sees_a_broken_order(tmp_path, monkeypatch):
  monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
  monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
  source = "def f():\n  from sao_jax.train import sao\n  import sao_jax.data.chat\n"
  (tmp_path / "models").mkdir()
  (tmp_path / "models" / "bad.py").write_text(source)
  assert len(broken_order(tmp_path / "models" / "bad.py")) == 2


def test_guests_stay_in_their_part():
  problems = []
  for path in modules():
    for line, name in imports(path):
      top = name.split(".")[0]
      if top in NOWHERE or ONLY_IN.get(top, part_of(path)) != part_of(path):
        problems.append(f"{path.relative_to(ROOT)}:{line}: imports {top}")
  assert problems == []


def test_jetstream_is_imported_in_one_file_that_lends_it_what_it_lacks():
  """Elsewhere in rollout/ its names come through that file, so that its import shim always ran."""
  files = {
    path.relative_to(PACKAGE).as_posix()
    for path in modules()
    for _, name in imports(path)
    if name.split(".")[0] == "jetstream"
  }
  assert len(files) <= 1, files


@pytest.mark.parametrize("module", ["config", "loader", "cli"])
def test_what_answers_at_once_imports_nothing_heavy_at_the_top(module):
  tree = ast.parse((PACKAGE / f"{module}.py").read_text())
  names = {
    name.split(".")[0]
    for node in tree.body
    for name in (
      [alias.name for alias in node.names]
      if isinstance(node, ast.Import)
      else [node.module or ""]
      if isinstance(node, ast.ImportFrom)
      else []
    )
  }
  assert names & {"jax", "flax", "numpy", "optax", "matplotlib", "rich", "absl"} == set()


def tracked_texts() -> Iterator[tuple[str, str]]:
  listed = subprocess.run(
    ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
  )
  if listed.returncode:
    pytest.skip("not a git checkout")
  for name in filter(None, listed.stdout.split("\0")):
    path = ROOT / name
    if not path.is_file() or path == pathlib.Path(__file__):
      continue
    data = path.read_bytes()
    if b"\0" not in data:
      yield name, data.decode("utf-8")


FORBIDDEN = {
  "a package registry's host": r"py"
  r"pi\.org|python"
  r"hosted\.org|deb\.deb"
  r"ian\.org|registry\.np"
  r"mjs",
  "a model hub's host": r"huggingface\.co|hf\.co",
  "a path of one machine": r"(?<![\w.])/(work|root|Users|home/\w+)/|\.\./shared",
  "unfinished work": r"\b(TODO|FIXME|XXX|HACK)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_text_names(what):
  found = [
    f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
    for name, text in tracked_texts()
    for match in re.finditer(FORBIDDEN[what], text)
  ]
  assert found == []


def test_links_in_the_documentation_lead_somewhere():
  broken = [
    f"{name}: {target}"
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / name).read_text())
    if not (ROOT / target).exists()
  ]
  assert broken == []


def test_functions_and_files_stay_short():
  """Functions under 60 lines and files under 500 keep the house readable in an afternoon."""
  long_functions, long_files = [], []
  for path in modules():
    text = path.read_text(encoding="utf-8")
    if text.count("\n") > 500:
      long_files.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
    for node in ast.walk(parse(path)):
      if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or 0) - node.lineno + 1
        if length > 70:
          long_functions.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length}")
  assert (long_functions, long_files) == ([], [])
