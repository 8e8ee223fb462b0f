"""docs/publication.md: its example names things that exist, and its tables say what the code says."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields
from pathlib import Path

from lockstep.sync.manifest import Layout, Manifest
from lockstep.sync.records import SCALE_SUFFIX
from lockstep.sync.transport import _MAGIC

PAGE = (Path(__file__).parents[2] / "docs" / "publication.md").read_text(encoding="utf-8")


def test_the_example_is_python_and_its_imports_resolve() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    found = 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            found += sum(hasattr(module, alias.name) for alias in node.names)
            assert all(hasattr(module, alias.name) for alias in node.names)
    assert found >= 6


def test_every_field_of_a_manifest_is_explained() -> None:
    for field in fields(Manifest):
        assert f"`{field.name}`" in PAGE, field.name
    flat = " ".join(PAGE.split())
    for word in (
        "scale format",
        "block size",
        "activation type",
        "attention",
        "KV cache",
        "ties",
        "role",
        "forward GEMM",
    ):
        assert word in flat
    assert len(fields(Layout)) == 9, "a new field of the layout belongs into the page"
    assert f"`NAME{SCALE_SUFFIX}`" in PAGE and f"`{_MAGIC.decode()}`" in PAGE
