"""What must hold of every file that lands: names, paths of no machine, no hidden exits, links that lead somewhere.

Minimal recipes are tested in test_params.py, parity of recipe, export and card in fidelity/, outputs and lengths of
cells in test_notebooks.py, secrets in test_masking.py, keys and links of pages in test_docs.py.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import nbformat
import pytest

from recipes import params

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_names_are_lower_case_words_joined_by_underscores():
    """Recipes, batches, modules and keys: what is typed in a shell needs no shift key and no guess."""
    files = [p for p in tracked() if p.parent.parts[len(ROOT.parts) :][:1] in (("recipes",), ("params",), ("scripts",))]
    named = [p for p in files if p.suffix in (".py", ".yaml", ".sh") and "baselines" not in p.parts]
    assert len(named) > 100
    # A stack is named as its release is: ascend-9.1.0. An exported script is named after its recipe's path.
    free = ("stacks", "shell")
    assert [p.name for p in named if p.parent.name not in free and not re.fullmatch(r"[a-z0-9_]+", p.stem)] == []
    assert [key for key in params.declared_keys() if not re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", key)] == []
    assert [key for key in params.SHORT_NAMES if not re.fullmatch(r"[a-z0-9_]+", key)] == []


# Home folders a file may name: examples of nobody's.
NOBODY = ("/home/x/", "/home/me/")


def test_no_file_holds_a_path_of_somebody_s_home():
    found = []
    for path in tracked():
        if path.suffix in (".png", ".gz", ".parquet") or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for one in re.finditer(r"(?<![\w.])/(?:home/\w[\w.-]*|Users/\w+|root)/[\w.]*", text):
            if not one[0].startswith(NOBODY):
                found.append(f"{path.relative_to(ROOT)}: {one[0]}")
    assert found == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_no_cell_ends_its_kernel(path):
    """An exit hides how a run ended: papermill calls the cell completed."""
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "code":
            continue
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("exit", "_exit", "abort", "kill")
            if isinstance(node, ast.Name):
                assert node.id not in ("exit", "quit", "SystemExit", "os", "sys", "subprocess")


def test_links_of_notebooks_and_anchors_of_pages_lead_somewhere():
    pages = {
        path: path.read_text(encoding="utf-8") for path in [*ROOT.glob("README*.md"), *ROOT.glob("notebooks/book/*.md")]
    }
    for path in NOTEBOOKS:
        cells = nbformat.read(path, 4).cells
        pages[path] = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for path, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)):
            place, _, anchor = target.partition("#")
            if target.startswith("http"):
                continue
            there = (path.parent / place).resolve() if place else path
            assert there.exists(), f"{path.name}: {target}"
            if anchor:
                titles = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.M)
                slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
                assert anchor in slugs, f"{path.name}: {target}"
