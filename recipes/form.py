"""A form for exploring a layout: settings → findings, memory, what differs from the recipe; and a recipe file of it.

`explore` is the whole of it without a form. `show` is what a notebook calls: the form where somebody looks at it, and
the same findings, bars and difference, once, where nobody does (papermill) or ipywidgets is not installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from recipes import layouts, memory, notebook, page, params, preflight
from recipes.atomic import replace_file
from recipes.command import Command, build, compose_verl, external_modules
from recipes.errors import RecipeError, nearest, writing
from recipes.finding import Finding
from recipes.params import Composed

# What decides a layout: the form's groups of fields, each a parameter's name and the recipe's key; then its columns.
GROUPS = {
    "Devices": {"nodes": "nodes", "devices": "devices"},
    "Training": {
        "tensor_parallel": "parallel.tensor",
        "pipeline_parallel": "parallel.pipeline",
        "context_parallel": "parallel.context",
        "expert_parallel": "parallel.expert",
        "expert_tensor_parallel": "parallel.expert_tensor",
    },
    "Batch and lengths": {
        "train_batch": "batch.train",
        "mini_batch": "batch.mini",
        "micro_batch": "batch.micro",
        "max_tokens": "batch.max_tokens",
        "max_prompt_length": "data.max_prompt_length",
        "max_response_length": "data.max_response_length",
    },
    "Generation": {"responses": "rollout.n", "rollout_tensor": "rollout.tensor", "rollout_memory": "rollout.memory"},
}
COLUMNS = (("Devices", "Generation"), ("Training",), ("Batch and lengths",))
FIELDS = {name: key for group in GROUPS.values() for name, key in group.items()} | {
    "stack": "stack",
    "pipeline_layout": "parallel.pipeline_layout",
}
# What a notebook's parameters cell may hold.
PARAMETERS = ("recipe", *FIELDS, "overrides", "write", "overwrite")

LABEL = "150px"
DELAY = 0.25  # seconds without a key pressed until the form looks


@dataclass(frozen=True)
class Explored:
    """What the settings come to. A setting that is refused is left out of all the rest, and `faults` says why.

    `faults` maps its name, or "" for what is of no single one, to a sentence. `base` is the recipe as it is; `changes`
    maps each key that differs from it to (its value there, its value here). `memory` is None for a CPU, and where
    `unknown` says why. Where nothing can be composed, `composed` is None.
    """

    base: Composed
    composed: Composed | None = None
    command: Command | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    found: tuple[Finding, ...] = ()
    looked: int = 0
    memory: memory.Memory | None = None
    unknown: str = ""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def text(self, path: Path | None = None) -> str:
        """Return the recipe file for `path`: the recipe as its base, and what differs; nothing else."""
        changed = {key: after for key, (_, after) in self.changes.items()}
        title = f"{self.base.name} with another {', '.join(changed)}" if changed else self.base.recipe.title
        base = layouts.base_name(self.base, path or Path("recipe.yaml"))
        return layouts.extending(base, title, changed, ("Made with notebooks/30_explore.ipynb, never run.",))

    def write(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the settings as a recipe file and return its absolute path, which stands wherever a recipe is named.

        The file is composed, built and checked before it has its name. A file that is there already with these very
        words is left as it is. Raises RecipeError where a setting is refused, the file is there and `overwrite` is not
        given, it cannot be written, or it would not be what is shown.
        """
        if self.faults:
            raise RecipeError(f"Nothing was written: {next(iter(self.faults.values()))}")
        path = Path(path).expanduser().absolute()
        if path.suffix not in (".yaml", ".yml"):
            raise RecipeError(f"write={str(path)!r}: a recipe is a YAML file; give it a name that ends in .yaml.")
        if path.resolve() in (file.resolve() for file in self.base.files):
            raise RecipeError(f"write={str(path)!r} is the recipe itself or one of its bases; choose another name.")
        content = self.text(path).encode()
        if path.exists() and not overwrite and not (path.is_file() and path.read_bytes() == content):
            raise RecipeError(f"{path} is there already; nothing was written. Choose another name, or set overwrite.")
        draft = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.yaml")  # beside it: its base may be a path
        with writing("write", path):
            replace_file(draft, content)
            try:
                self._refuse_another(draft)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        return path

    def _refuse_another(self, draft: Path) -> None:
        """Raise RecipeError unless the file composes to the same command and the same findings."""
        read = params.compose(str(draft), label=self.composed.name)
        if build(read) != self.command or tuple(preflight.check(read, here=False)) != self.found:
            raise RecipeError("The file would not be what is shown, so nothing was written; write the recipe by hand.")

    def beside(self, name: str) -> tuple[str, str]:
        """Return what to say beside a setting: (severity, words), its fault or the rules that found something at it."""
        if sentence := self.faults.get(name):
            return "error", sentence
        rules = [f for f in self.found if FIELDS.get(name) in f.keys and f.severity != "info"]
        return (rules[0].severity, ", ".join(dict.fromkeys(f.rule for f in rules))) if rules else ("", "")

    def findings_html(self) -> str:
        """Return the findings, after what is wrong with no single setting."""
        words = [page.paragraph(self.faults[""])] if "" in self.faults else []
        if left := [_plain(name) for name in self.faults if name]:
            words.append(page.paragraph(f"As in the recipe below, for it cannot be as entered: {', '.join(left)}."))
        shown = notebook.Findings(self.found, looked=self.looked).html() if self.looked else ""
        return page.block(*words) + shown

    def memory_html(self) -> str:
        """Return the bars of the fullest device, or why there are none; nothing for a CPU."""
        if self.memory is None:
            return page.block(page.paragraph(self.unknown)) if self.unknown else ""
        return page.block(notebook.bars_html(self.memory))

    def difference_html(self) -> str:
        """Return what differs from the recipe, and the file that says so."""
        if not self.changes:
            return page.block(page.paragraph(f"Nothing differs from {self.base.name}."))
        return page.block(
            page.table(("key", f"in {self.base.name}", "here"), self._rows()),
            page.folded("as a recipe file", page.verbatim(self.text())),
        )

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(key, _shown(before), _shown(after)) for key, (before, after) in self.changes.items()]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        own = page.block(*(page.paragraph(sentence) for name, sentence in self.faults.items() if name))
        lines = list(self.faults.values())
        if self.looked:
            lines.append(notebook.Findings(self.found, memory=self.memory, looked=self.looked).text())
        lines += [self.unknown] if self.unknown else []
        lines += [f"{key} = {after}  (in {self.base.name}: {before})" for key, before, after in self._rows()]
        html = own + self.findings_html() + self.memory_html() + self.difference_html()
        return {"text/html": html, "text/plain": "\n".join(lines)}


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _plain(name: str) -> str:
    return name.replace("_", " ")


def explore(
    recipe: str, stack: str | None = None, *, overrides: str | Iterable[str] = (), fetch: bool = True, **settings: Any
) -> Explored:
    """Look at a recipe with other settings, named as in FIELDS, and `overrides` (key=value) on top of them.

    None or "" is as in the recipe. The rules are those on the recipe alone, as of `recipes check --anywhere`; nothing
    of this machine is looked at, and nothing is started. `fetch=False`: verl's configuration is not fetched where it is
    not at hand. A setting that is refused is no error but a fault of the result. Raises RecipeError for an unknown
    recipe, and for a name that is no setting's.
    """
    for name in settings:
        if name not in FIELDS:
            raise RecipeError(f"There is no setting {name!r}{nearest(name, FIELDS)}")
    given = {name: value for name, value in {"stack": stack, **settings}.items() if value not in (None, "")}
    base, faults = params.compose(recipe), {}
    if isinstance(overrides, str):
        try:
            overrides = shlex.split(overrides)
        except ValueError as fault:
            overrides, faults["overrides"] = (), f"overrides={overrides!r} cannot be read: {fault}."
    composed, refused = _compose(recipe, given, list(overrides))
    faults |= refused
    if composed is None:
        return Explored(base, faults=faults)
    changes = _changes(base, composed)
    try:
        subject, found = preflight.subject(composed), tuple(preflight.check(composed, here=False))
    except RecipeError as fault:  # facts that are not there: a stack, a kind of node
        return Explored(base, composed, faults={**faults, "": str(fault)}, changes=changes)
    command, needed, unknown = None, None, ""
    try:
        command = build(composed, fetch=fetch)
        compose_verl(command, composed, fetch=fetch)
    except RecipeError as fault:
        faults[""] = str(fault)
    if composed.recipe.hardware != "cpu":
        try:
            needed = memory.estimate(subject)
        except RecipeError as fault:
            unknown = f"Memory was not computed: {fault}"
    looked = len(preflight.looking(here=False))
    return Explored(base, composed, command, faults, found, looked, needed, unknown, changes)


def _compose(recipe: str, given: dict[str, Any], overrides: list[str]) -> tuple[Composed | None, dict[str, str]]:
    """Compose without the settings that are refused; return what is left, and a sentence for each that is not."""
    faults: dict[str, str] = {}
    while True:
        try:
            texts = [f"{FIELDS[name]}={value}" for name, value in given.items()]
            return params.compose(recipe, [*texts, *overrides]), faults
        except RecipeError as fault:
            culprit = _culprit(str(fault), given, overrides)
            faults[culprit] = str(fault)
        if not culprit:
            return None, faults
        if culprit == "overrides":
            overrides = []
        given = {name: value for name, value in given.items() if name != culprit}


def _culprit(sentence: str, given: Mapping[str, Any], overrides: list[str]) -> str:
    """Return the setting a sentence is about: one on a value names the override it came with. Overrides hold last."""
    keys = [params.SHORT_NAMES.get(key, key) for key in (text.partition("=")[0].strip() for text in overrides)]
    for name in given:
        if f"(override {FIELDS[name]})" in sentence and FIELDS[name] not in keys:
            return name
    return "overrides" if overrides else ""


def _changes(base: Composed, composed: Composed) -> dict[str, tuple[Any, Any]]:
    before, after = (dict(params.flatten(params.to_dict(one.recipe))) for one in (base, composed))
    # On a command line they are added to the recipe's; in a file they are all there is.
    after["external_modules"] = list(external_modules(composed, {}))
    return {key: (before.get(key), after.get(key)) for key in composed.given if before.get(key) != after.get(key)}


# ----------------------------------------------------------------------------------------------------- in a notebook


def show(namespace: Mapping[str, Any]) -> Form | Explored:
    """Show what the parameters in a notebook's `globals()` come to: as a form, or once, where nobody could use one.

    Without a form, a parameter `write` names the file to write. Raises RecipeError for a parameter nobody knows, an
    unknown recipe, and, without a form, a value that is refused or a file that cannot be written.
    """
    notebook.refuse_unknown(namespace, PARAMETERS)
    recipe, overrides = namespace.get("recipe"), namespace.get("overrides") or []
    if not isinstance(recipe, str) or not recipe:
        raise RecipeError(f"recipe={recipe!r} must be the name of a recipe, such as quickstart/grpo.")
    if not isinstance(overrides, (str, list)) or not all(isinstance(text, str) for text in overrides):
        raise RecipeError(f"overrides={overrides!r} must be a list of texts such as 'optimizer.lr=1e-6'.")
    settings = {name: namespace.get(name) for name in FIELDS}
    write, overwrite = namespace.get("write"), bool(namespace.get("overwrite"))
    if interactive(namespace):
        return Form(recipe, overrides=overrides, write=write or "", overwrite=overwrite, **settings)
    explored = explore(recipe, overrides=overrides, **settings)
    if explored.faults:
        raise RecipeError(next(iter(explored.faults.values())))
    if write:
        print(written(explored.write(write, overwrite=overwrite)))
    return explored


def written(path: Path) -> str:
    """Return what to do with a file that was written."""
    return (
        f"Written: {path}\n  from a terminal: recipes run {shlex.quote(str(path))}\n"
        f"  in the parameters of a notebook: recipe = {str(path)!r}"
    )


def interactive(namespace: Mapping[str, Any]) -> bool:
    """Say whether a form can be used: ipywidgets is there, and the kernel is one of a Jupyter server or of VS Code.

    jupyter_server names the kernel's session in JPY_SESSION_NAME, VS Code its notebook in __vsc_ipynb_file__. papermill
    does neither; started from a kernel that has them, it is known by the cell it injects.
    """
    if importlib.util.find_spec("ipywidgets") is None:
        return False
    injected = any(source.startswith("# Parameters\n") for source in namespace.get("In", ()))
    return not injected and ("JPY_SESSION_NAME" in os.environ or "__vsc_ipynb_file__" in namespace)


class Form:
    """The form: a field for each setting, empty for *as in the recipe*, and below what the settings come to.

    `fields[name]` is a widget whose `value` may be set, `explored` what is shown now, `button` writes it to the file
    that `file` names. A change is looked at when nothing has changed for DELAY seconds.
    """

    def __init__(
        self,
        recipe: str,
        stack: str | None = None,
        *,
        overrides: str | Iterable[str] = (),
        write: str = "",
        overwrite: bool = False,
        **settings: Any,
    ) -> None:
        """Build the widgets and look once. Raises RecipeError for an unknown recipe, stack or name of a setting."""
        import ipywidgets as w

        overrides = overrides if isinstance(overrides, str) else shlex.join(overrides)
        self.explored = explore(recipe, stack, overrides=overrides, **settings)
        stacks = params.fact_names("stacks")
        if stack and stack not in stacks:
            raise RecipeError(f"stack={stack!r} is no stack{nearest(stack, stacks)} Known: {', '.join(stacks)}.")
        names = list(dict.fromkeys([*params.names(), recipe]))  # a path may be given as well
        wide = {"style": {"description_width": LABEL}, "layout": w.Layout(width="640px", max_width="100%")}
        narrow = {"style": {"description_width": LABEL}, "layout": w.Layout(width="260px")}
        self.fields: dict[str, Any] = {
            "recipe": w.Dropdown(options=names, value=recipe, description="recipe", **wide),
            "stack": w.Dropdown(
                options=[("as in the recipe", ""), *((name, name) for name in stacks)],
                value=stack or "",
                description="stack",
                **wide,
            ),
        }
        given = {**settings, "overrides": overrides}
        for name in (*FIELDS, "overrides"):
            if name not in self.fields:
                size = wide if name in ("pipeline_layout", "overrides") else narrow
                text = "" if given.get(name) is None else str(given[name])
                self.fields[name] = w.Text(value=text, description=_plain(name), **size)
        self.fields["overrides"].placeholder = "any other keys, such as memory.recompute=full rollout.n=8"
        for name, key in FIELDS.items():
            self.fields[name].tooltip = f"{key}: {params.declared_keys()[key]}"
        # As wide as its field: words that come and go move nothing sideways.
        self.beside = {name: w.HTML(layout=w.Layout(width=one.layout.width)) for name, one in self.fields.items()}
        self.findings, self.bars, self.difference, self.said = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.file = w.Text(
            value=write, description="file", placeholder="mine.yaml", **{**wide, "layout": w.Layout(width="520px")}
        )
        self.overwrite = w.Checkbox(
            value=overwrite, description="overwrite", indent=False, layout=w.Layout(width="auto")
        )
        self.button = w.Button(description="Write this recipe")
        self.widget = w.VBox(
            [
                *self._with_words("recipe", "stack"),
                w.HBox(
                    [w.VBox([part for title in column for part in self._group(title)]) for column in COLUMNS],
                    layout=w.Layout(flex_flow="row wrap", align_items="flex-start"),
                ),
                *self._with_words("pipeline_layout", "overrides"),
                *(self.findings, self.bars, self.difference),
                w.HBox([self.file, self.overwrite, self.button], layout=w.Layout(flex_flow="row wrap")),
                self.said,
            ]
        )
        self._timer: asyncio.TimerHandle | None = None
        self._settings, self._asked, self._drawn = self.settings(), {stack or ""}, None
        self._show()
        for one in self.fields.values():
            one.observe(self._changed, "value")
        self.button.on_click(self._write)

    def _group(self, title: str) -> list[Any]:
        import ipywidgets as w

        return [w.HTML(f"<b>{escape(title)}</b>"), *self._with_words(*GROUPS[title])]

    def _with_words(self, *names: str) -> list[Any]:
        return [widget for name in names for widget in (self.fields[name], self.beside[name])]

    def settings(self) -> dict[str, str]:
        """Return what the fields say, as `explore` takes it."""
        return {name: one.value.strip() for name, one in self.fields.items()}

    def look(self) -> None:
        """Look at the settings as they are now, and show what they come to; nothing is done where none has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (settings := self.settings()) == self._settings:
            return
        # verl's configuration is fetched once for a stack: without a network, each key would try it again.
        fetch = settings["stack"] not in self._asked
        self._asked.add(settings["stack"])
        self._settings, self.said.value = settings, ""
        try:
            self.explored = explore(**settings, fetch=fetch)
        except RecipeError as fault:  # the recipe's own file is at fault
            self.beside["recipe"].value = _coloured("error", str(fault))
            self.button.disabled, self._settings = True, {}
            return
        self._show()

    def _show(self) -> None:
        now = self.explored
        as_it_is = dict(params.flatten(params.to_dict(now.base.recipe)))
        as_it_is["devices"] = preflight.subject(now.base).devices_per_node
        for name, key in FIELDS.items():
            if name != "stack":
                self.fields[name].placeholder = _shown(as_it_is.get(key))
        for name, words in self.beside.items():
            words.value = _coloured(*now.beside(name))
        self.findings.value, self.difference.value = _tight(now.findings_html()), _tight(now.difference_html())
        self.button.disabled = bool(now.faults)
        if (bars := (now.memory, now.unknown)) != self._drawn:  # drawing takes longer than all the rest
            self._drawn, self.bars.value = bars, _tight(now.memory_html())

    def _changed(self, change: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            self._timer = asyncio.get_running_loop().call_later(DELAY, self.look)
        except RuntimeError:  # not in a kernel
            self.look()

    def _write(self, button: Any = None) -> None:
        self.look()
        try:
            if not self.file.value.strip():
                raise RecipeError("Name the file to write, such as mine.yaml.")
            path = self.explored.write(self.file.value.strip(), overwrite=self.overwrite.value)
            self.said.value = _tight(page.block(page.verbatim(written(path))))
        except RecipeError as fault:
            self.said.value = _coloured("error", str(fault))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The form, and for a page that has no kernel what it shows."""
        return {**self.widget._repr_mimebundle_(), **self.explored._repr_mimebundle_()}


def _tight(html: str) -> str:
    """A widget's lines are as high as a field."""
    return f'<div style="line-height:1.5">{html}</div>'


def _coloured(severity: str, words: str) -> str:
    if not words:
        return ""
    colour = "--jp-error-color1,#d1242f" if severity == "error" else "--jp-warn-color1,#c77a00"
    style = f"color:var({colour});line-height:1.3;white-space:normal;overflow-wrap:anywhere"
    return f'<div style="{style}">{escape(words)}</div>'
