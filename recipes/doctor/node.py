"""What is looked at: this machine, the interpreter that trains, and the run a recipe would make of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipes import stack
from recipes.command import EXTERNAL_MODULES, external_modules
from recipes.params import Composed
from recipes.preflight import Subject, subject
from recipes.stack import Stack


@dataclass(frozen=True)
class Node:
    """A machine before a run. `subject` and `stack` are None when no recipe was named.

    `environment` is what the run would inherit, `modules` the external modules verl would import, in order, and
    `folder` where it would be launched. `root` is `/`, or a folder laid out like it (tests).
    """

    python: str
    environment: Mapping[str, str]
    modules: tuple[str, ...] = ()
    subject: Subject | None = None
    stack: Stack | None = None
    root: Path = Path("/")
    folder: Path = field(default_factory=Path.cwd)
    # What commands have answered: npu-smi takes seconds on a busy node, and several checks ask it the same.
    answers: dict[tuple[str, ...], str] = field(default_factory=dict, compare=False, repr=False)

    def file(self, path: str) -> Path:
        """Return an absolute path of the machine, below `root`."""
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """Return the text of a file of the machine, or None when there is none or it cannot be read."""
        try:
            return self.file(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    @property
    def shows_npu(self) -> bool:
        """Whether the driver shows a device here (/dev/davinciN), usable or not."""
        return any(self.file("dev").glob("davinci[0-9]*"))

    @property
    def without_npu(self) -> bool:
        """Whether the recipe is for a machine without an accelerator."""
        return self.subject is not None and self.subject.hardware.device != "npu"

    @property
    def several(self) -> bool:
        """Whether the run spans nodes: those that train, and those that only generate."""
        if self.subject is None:
            return False
        recipe = self.subject.recipe
        apart = recipe.fully_async.rollout_nodes or 0 if recipe.mode == "fully_async" else 0
        return recipe.nodes + apart > 1

    @property
    def ranks(self) -> int:
        """Devices the run uses on one node, the larger number where training and generation differ."""
        assert self.subject is not None
        apart, trains = self.subject.recipe.fully_async, self.subject.devices_per_node
        if self.subject.recipe.mode != "fully_async" or not apart.rollout_nodes:
            return trains
        return max(trains, apart.rollout_devices or self.subject.hardware.devices_per_node)


def make(composed: Composed | None, python: str, environment: Mapping[str, str] | None = None) -> Node:
    """Return the node a run of `composed` (None: no recipe) would find here, under the caller's environment.

    Raises RecipeError when the recipe names unknown facts, an unknown stack or an external module that is no name.
    """
    inherited = dict(os.environ if environment is None else environment)
    if composed is None:
        named = inherited.get(EXTERNAL_MODULES, "").split(",")
        return Node(python, inherited, tuple(dict.fromkeys(n.strip() for n in named if n.strip())))
    modules = external_modules(composed, inherited)
    merged = {**inherited, **composed.recipe.env}
    if modules:
        merged[EXTERNAL_MODULES] = ",".join(modules)
    return Node(python, merged, modules, subject(composed, python), stack.load(composed.recipe.stack))
