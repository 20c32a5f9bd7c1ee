"""Go on with a run that has ended: attempt N+1 in the same directory, from the last whole checkpoint.

Everything it would do is known, and can be shown, before anything is started.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes import params
from recipes.command import Command, build
from recipes.errors import RecipeError
from recipes.run import launch
from recipes.run.checkpoints import ResumePoint, resume_point
from recipes.run.directory import Run, begin_attempt, here, is_here, now, read_state, update_state
from recipes.run.supervisor import GRACE

# Without these two the weights of a checkpoint mean nothing, or another run's curve would be continued.
FIXED = ("model.name", "run_dir", "checkpoint.directory")
# Decided by resuming itself.
OWN = ("checkpoint.resume", "checkpoint.resume_path", "run_dir", "work")


@dataclass(frozen=True)
class Resumption:
    """What `recipes run --resume` would start."""

    run: Run
    attempt: int
    composed: params.Composed
    command: Command
    point: ResumePoint
    reached: int
    changes: tuple[tuple[str, Any, Any], ...]

    def lines(self) -> list[str]:
        """Say in lines of text what it goes on from and what is different from the attempt before."""
        told = [f"Attempt {self.attempt} of {self.run.path}."]
        told += self.point.lines(self.reached, self.composed.recipe.trainer.steps)
        told += [f"Changed: {key} from {before!r} to {now!r}." for key, before, now in self.changes]
        return told


def plan(
    run: Run,
    overrides: Iterable[str] = (),
    parameters: Mapping[str, Any] | None = None,
    *,
    python: str | None = None,
) -> Resumption:
    """Return what resuming `run` would start. Nothing is written.

    `overrides` (key=value) and `parameters` (typed, by full key) change the recipe the run was started with. Raises
    RecipeError for a run that has not ended or has nothing left to do, a checkpoint that is named but not whole, a
    change that makes its checkpoints worthless, or a recipe file that says something else by now, where the caller
    has not said which value to take.
    """
    state, overrides = read_state(run), list(overrides)
    if state["state"] == "prepared":
        raise RecipeError(f"{run.path} is about to start; `recipes watch` shows it.")
    if state["state"] == "running":
        raise RecipeError(f"{run.path} is running (step {_reached(run)}); `recipes watch` shows it.")
    _refuse_moved(run)
    then = _recorded(run, state)
    kept = dict(params.flatten(params.to_dict(then.recipe)))
    point = resume_point(Path(then.recipe.checkpoint.directory))
    where = {"checkpoint.resume": "disable"}
    if point.checkpoint is not None:
        where = {"checkpoint.resume": "resume_path", "checkpoint.resume_path": str(point.checkpoint.path)}
    composed = _recorded(run, state, overrides, {**(parameters or {}), **where})
    now = dict(params.flatten(params.to_dict(composed.recipe)))
    asked = {key for key in composed.given if key not in OWN}
    changes = tuple(
        (key, kept.get(key), now.get(key)) for key in sorted({*kept, *now} - set(OWN)) if kept.get(key) != now.get(key)
    )
    for key, before, after in changes:
        if key in FIXED:
            raise RecipeError(
                f"{key}={after!r} cannot be changed by resuming (the run has {before!r}): start a new run."
            )
    _refuse_drift(state, then, kept, asked)
    steps = composed.recipe.trainer.steps
    if steps is not None and point.step >= steps:
        raise RecipeError(
            f"{run.path} has made all its {steps} steps (trainer.steps); to go on, give a larger number: steps=…"
        )
    number = run.latest + 1 if run.attempts else 1
    command = build(composed, attempt=number, python=python)
    return Resumption(run, number, composed, command, point, _reached(run), changes)


def resume(
    resumption: Resumption,
    *,
    on_disconnect: str | None = None,
    deadline_seconds: float | None = None,
    grace_seconds: float = GRACE,
    waived: Iterable[str] = (),
) -> Run:
    """Start the next attempt of a run. The arguments are those of launch.start. Returns at once.

    Of two that resume a run at once one gets it. Raises RecipeError for the other, and when it cannot be started.
    """
    run, number, composed = resumption.run, resumption.attempt, resumption.composed
    details = launch.terms(
        composed,
        on_disconnect=on_disconnect,
        deadline_seconds=deadline_seconds,
        grace_seconds=grace_seconds,
        waived=waived,
    )
    config = launch.verl_yaml(resumption.command, composed)
    begin_attempt(run, number)
    try:
        if is_here(read_state(run)):
            launch.stop(run)  # a run that was lost may have left something
        state = read_state(run)
        given = sorted({*state.get("given", ()), *details.pop("given")} - set(OWN))
        checkpoint = resumption.point.checkpoint
        entry = {
            "number": number,
            "from_step": resumption.point.step,
            "from_checkpoint": str(checkpoint.path) if checkpoint else None,
            "changes": [{"key": key, "before": before, "now": now} for key, before, now in resumption.changes],
        }
        launch.write_down(run, number, composed, resumption.command, config)
        starting = {"state": "prepared", "cause": "", "place": here(), "heartbeat": now()}
        update_state(run, **details, **starting, given=given, attempts=[*state["attempts"], entry])
    except BaseException:
        shutil.rmtree(run.attempt(number), ignore_errors=True)  # not begun after all: the next try has its number
        raise
    launch.start_supervisor(run, number)
    return run


def _recorded(
    run: Run, state: dict[str, Any], overrides: Iterable[str] = (), parameters: Mapping[str, Any] | None = None
) -> params.Composed:
    """The recipe of the latest attempt as it was resolved, with `parameters` and `overrides` on top."""
    path = run.path / "recipe.yaml"
    if not path.is_file():
        raise RecipeError(f"{run.path} cannot be resumed: it has no recipe.yaml.")
    work = _as_written(run, "work")
    composed = params.compose(
        str(path), overrides, parameters, run_dir=str(run.path), work=work, label=state.get("file") or state["recipe"]
    )
    return dataclasses.replace(composed, name=state["recipe"])


def _as_written(run: Run, key: str) -> str | None:
    """The text of a key in a run's own recipe.yaml; None where the key or the file is not there."""
    path = run.path / "recipe.yaml"
    settings = params.read_file(path)[0] if path.is_file() else []
    return next((s.value.text for s in settings if s.key == key), None)


def _refuse_moved(run: Run) -> None:
    """Refuse a run whose directory is another than it was made in: its checkpoints and outputs are named by place."""
    made = _as_written(run, "run_dir")
    if made and Path(made).resolve() != run.path.resolve():
        raise RecipeError(
            f"{run.path} was made in {made}, and a run resumes where it was made: its paths point there. Move it back, "
            "or start a new run with checkpoint.resume=resume_path and checkpoint.resume_path set to its checkpoint."
        )


def _refuse_drift(state: dict[str, Any], then: params.Composed, kept: dict[str, Any], asked: set[str]) -> None:
    """Refuse where the recipe's file no longer says what the run was started with, unless the caller has decided."""
    if "given" not in state:
        return  # of a time when that was not recorded
    given = {key: kept[key] for key in state.get("given", ()) if key in kept and key not in OWN}
    name = state.get("file") or state["recipe"]
    try:
        today = params.compose(name, (), given, run_dir=then.recipe.run_dir, work=then.recipe.work)
    except params.NoRecipeError:
        return  # the file is gone or was never in params/: the run's own copy is all there is
    except RecipeError as fault:
        raise RecipeError(
            f"What the recipe {name} says by now cannot be compared with what the run was started with: {fault} Mend "
            f"the file; {then.recipe.run_dir}/recipe.yaml is as it was then."
        ) from fault
    said = dict(params.flatten(params.to_dict(today.recipe)))
    ignored = {*OWN, "external_modules", "notes", "title"}
    moved = [k for k in sorted({*said, *kept} - ignored) if said.get(k) != kept.get(k) and k not in asked]
    if moved:
        words = "; ".join(f"{k} is {said.get(k)!r} there, {kept.get(k)!r} in the run" for k in moved[:5])
        more = f" and {len(moved) - 5} more" if len(moved) > 5 else ""
        raise RecipeError(
            f"The recipe {today.name} has changed since: {words}{more}. Say which value to take, such as "
            f"{moved[0]}={kept.get(moved[0])}."
        )


def _reached(run: Run) -> int:
    """The last step any attempt has made, 0 before the first."""
    reached = 0
    for number in run.attempts:
        with_lines = run.metrics(number)
        if with_lines.is_file():
            for line in with_lines.read_bytes().splitlines():
                try:
                    reached = max(reached, int(json.loads(line)["step"]))
                except (ValueError, KeyError, TypeError):
                    continue
    return reached
