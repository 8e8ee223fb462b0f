"""Three walks through the code that docs/architecture.md promises: every file exists and leads to the next.

It leads there when it imports it, or imports a file that does and that lies in the folder of one of the two.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "lockstep"
WALKS = {
    "command to arithmetic": (
        "cli/train.py",
        "launch/local.py",
        "trainer/loop.py",
        "models/decoder.py",
        "nn/linear.py",
        "kernels/reference.py",
    ),
    "sample to cache": (
        "trainer/loop.py",
        "rollout/engine.py",
        "rollout/runner.py",
        "models/decoder.py",
        "kernels/reference.py",
    ),
    "weights to engine": (
        "trainer/loop.py",
        "sync/publish.py",
        "sync/receipt.py",
        "nn/working.py",
        "kernels/renew.py",
        "numerics/quantize.py",
    ),
}


def imports(file: Path) -> set[str]:
    """Every lockstep module that a file imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("lockstep.")}


def leads_to(here: str, following: str) -> bool:
    """Whether `here` imports `following`, itself or through one neighbour of either."""
    target, found = module_of(following), imports(PACKAGE / here)
    folders = {(PACKAGE / here).parent, (PACKAGE / following).parent}
    files = [
        f for folder in folders for f in folder.glob("*.py") if module_of(f.relative_to(PACKAGE)) in found
    ]
    return target in found or any(target in imports(f) for f in files)


def module_of(file: str | Path) -> str:
    """`nn/linear.py` as `lockstep.nn.linear`."""
    return "lockstep." + str(file).removesuffix(".py").replace("/", ".")


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS.keys())
def test_every_file_leads_to_the_next(walk: tuple[str, ...]) -> None:
    for here, following in pairwise(walk):
        assert (PACKAGE / following).exists()
        assert leads_to(here, following), f"{here} does not lead to {following}"


def test_the_documentation_shows_the_same_walks() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    flat = " ".join(page.split())
    for walk in WALKS.values():
        assert ", ".join(f"`{step}`" for step in walk) in flat
