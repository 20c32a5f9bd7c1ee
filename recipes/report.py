"""A run, or several, as one HTML file, light and dark: it needs no network, no script and no other file.

    write(["runs/…"], "report.html")

Made of the same pieces as the notebook: state, verdict, curves, diagnosis, provenance. Everything that is not ours
(log, model, data) is escaped, and what looks like a secret is masked. A policy in the file forbids the browser to load
anything, whatever it holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from recipes import curves, differences, drawing, exports, live, masking, metrics, page, verdict
from recipes.atomic import replace_file
from recipes.errors import RecipeError
from recipes.run.directory import Run, now, open_run
from recipes.series import number, series

FILE = "report.html"
MOST = 2_000_000
"""Bytes a report may have: it is sent by mail and kept for years."""
_PACKAGES = ("verl", "megatron-core", "megatron-bridge", "mindspeed", "torch", "torch-npu", "vllm", "vllm-ascend")
_PACKAGES += ("sglang", "transformers", "ray", "transferqueue")
_SHARP, _PLAIN = 160, 100  # dots an inch of the curves; the second where the first does not fit

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--muted:#59636e;--rule:#dfe3e8;--soft:#f6f8fa;
--fail:#c4122f;--warn:#a35200;--pass:#007d5c;--info:#59636e}
@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--muted:#9198a1;--rule:#272d36;--soft:#151b23;
--fail:#ff7b72;--warn:#e69f00;--pass:#2cb68d;--info:#9198a1}}
body{margin:0 auto;max-width:1000px;padding:24px 20px 60px;background:var(--paper);color:var(--ink);
font:14px/1.5 system-ui,"Segoe UI","Noto Sans","Noto Sans CJK SC",sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:16px;margin:30px 0 6px}p{margin:6px 0}
.about{color:var(--muted)}.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:6px 0}th,td{text-align:left;vertical-align:top;padding:3px 16px 3px 0;
border-bottom:1px solid var(--rule);overflow-wrap:anywhere;min-width:3em}
th{font-weight:600;color:var(--muted)}
th,td:first-child{white-space:nowrap}
pre{font:12px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;background:var(--soft);padding:10px;margin:6px 0;
white-space:pre-wrap;overflow-wrap:anywhere;border-radius:4px}
summary{cursor:pointer;overflow-wrap:anywhere}details{margin:6px 0}
img{max-width:100%;height:auto;display:block}
.fail{color:var(--fail)}.warn{color:var(--warn)}.pass{color:var(--pass)}.info{color:var(--info)}
.fail,.warn,.pass,.info{font-weight:600}
@media print{body{max-width:none}details{display:block}}
"""


def write(sources: Sequence[str | Path], output: str | Path, *, by: str = "step", light: bool = False) -> Path:
    """Write the report of one run or log, or the comparison of several, to `output` in one move; returns its path.

    Raises RecipeError for a source that cannot be read, OSError for a file that cannot be written.
    """
    return replace_file(output, of(sources, by=by, light=light).encode())


def of(sources: Sequence[str | Path], *, by: str = "step", light: bool = False) -> str:
    """The report as text. `light` leaves out what takes long: exports are not compared again, rollouts not read."""
    if not sources:
        raise RecipeError("A report needs a run or a log.")
    if len(sources) > 1:
        from recipes import compare

        return of_comparison(compare.compare(sources, by=by))
    path = Path(sources[0])
    if (path / "run.json").is_file():
        return of_run(open_run(path), light=light)
    return of_log(path)


def of_run(run: Run, *, light: bool = False) -> str:
    """A run: state and cause, verdict, curves, diagnosis, recipe, exports, rollouts, provenance."""
    moment = live.look(run)
    state = moment.state
    failed = state["state"] in ("failed", "lost")
    judged, exported = _judged(run, light=light)
    sections = [
        ("Summary", _table(("", ""), [*_summary(run, moment), *figures(moment.metrics)])),
        ("Why it failed", _diagnosis(run) if failed else ""),
        ("Verdict", _verdict(judged)),
        ("Curves", lambda dpi: _of_folder(run, dpi) or _curves(moment.metrics, state["recipe"], moment.steps, dpi)),
        ("What differs from the recipe as it is here now", _own(run, state["recipe"])),
        ("Exports", _exports(exported)),
        ("Rollouts", "" if light else _rollouts(run.path)),
        ("Provenance", _provenance(differences.told(run))),
        ("The end of the log", _quoted("\n".join(moment.tail)) if moment.tail else ""),
    ]
    words = f"{state['state']}{': ' + state['cause'] if state.get('cause') else ''}"
    return _document(str(state["recipe"]), f"{words} · {run.path.name}", sections)


def _judged(run: Run, *, light: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(verdict, exports) as plain data: anew, or, if it is to be quick, as they were last judged, if they were."""
    from recipes import notebook

    if not light:
        found, exported = notebook.verdict_of(run)
        return found.to_dict(), exported.to_dict() if exported else {}
    exported_then = _json(run.path / exports.CHECKS)
    return verdict_kept(run), exported_then


def verdict_kept(run: Run) -> dict[str, Any]:
    """The run's verdict as it was last judged, empty if it was not since its last step."""
    return _json(run.verdict_file) if _newer(run.verdict_file, run.metrics()) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _newer(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_mtime >= other.stat().st_mtime
    except OSError:
        return False


def _of_folder(run: Run, dpi: int) -> str:
    """The curves as they were just written beside the run, where they are not older than its numbers."""
    files = [run.curves / name for name in ("curves.png", "curves-dark.png")]
    if dpi != _SHARP or not all(_newer(file, run.metrics()) for file in files):
        return ""
    return _picture(*(file.read_bytes() for file in files), curves.describe(live.look(run).metrics))


def of_log(path: Path) -> str:
    """A log or a file of metrics: verdict and curves, and of a console log why its training failed, if it did."""
    from recipes import diagnosis, notebook

    try:
        found = metrics.read(path)
    except RecipeError:
        bad = diagnosis.failed(path)
        if bad is None:
            raise
        return _document(path.name, "from a log that holds no step of a training", [("Why it failed", _why(bad))])
    judged, bad = notebook.verdict_of_file(path, found)
    if not len(found.table) and not bad:
        raise RecipeError(f"{found} There is nothing to report.")
    sections = [
        ("Summary", _said(str(found)) + _table(("", ""), figures(found))),
        ("Why it failed", _why(bad) if bad else ""),
        ("Verdict", _verdict(judged.to_dict(), bare=True)),
        ("Curves", lambda dpi: _curves(found, path.name, None, dpi)),
    ]
    return _document(path.name, "from a log: settings, provenance and how the training ended are not in it", sections)


def of_comparison(found: Any) -> str:
    """Several, as `compare` found them."""
    from recipes import compare_view

    def drawn(dpi: int) -> str:
        images = [
            drawing.png(compare_view.figure(found, theme=theme), dpi=dpi)  # type: ignore[arg-type]
            for theme in ("light", "dark")
        ]
        return _picture(*images, compare_view.describe(found))

    title = " against ".join(one.name for one in found.groups)
    outcome = [(letter, _ended(one.sources)) for letter, one in zip(found.letters, found.groups, strict=True)]
    sections = [
        ("Outcome", _table(("", ""), outcome)),
        ("Curves", drawn),
        ("Numbers", compare_view.tables(found)),
    ]
    return _document(title, f"{len(found.sources)} sources, aligned by {found.by}", sections)


def _ended(sources: Iterable[Any]) -> str:
    said = []
    for source in sources:
        told = source.facts.get("outcome", {})
        cause = f" ({told['cause']})" if told.get("cause") else ""
        last = int(source.metrics.table.index[-1])
        said.append(f"{source.name}: {told.get('state', 'a log')}{cause}, {last} steps")
    return "; ".join(said)


# -------------------------------------------------------------------------------------------------------- the pieces


def figures(found: metrics.Metrics) -> list[tuple[str, str]]:
    """What a run gave and took, in a few numbers: reward, validation, seconds, tokens, memory."""
    said = []
    for key, name, unit in (
        ("critic/rewards/mean", "reward", ""),
        *((key, key, "") for key in curves.validation_keys(found, limit=3)),
        ("response_length/mean", "response length", " tokens"),
    ):
        values = series(found, key).values
        if len(values):
            width = 1 if key.startswith("val-") else 5
            first, last, best = values[:width].mean(), values[-width:].mean(), values.max()
            most = f", {number(float(best))} at most" if name != "response length" else ""
            said.append((name, f"{number(float(first))} → {number(float(last))}{unit}{most}"))
    return said + list(live.pace(found))


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, its cells masked: what a cause or a path holds is anybody's."""
    return page.table(header, [[masking.mask(str(cell)) for cell in row] for row in rows])


def _said(text: str) -> str:
    return page.paragraph(masking.mask(text))


def _quoted(text: str) -> str:
    return page.verbatim(masking.mask(text))


def _summary(run: Run, moment: live.Moment) -> list[tuple[str, str]]:
    state = moment.state
    attempts = state.get("attempts") or []
    seconds = sum(one.get("seconds") or 0.0 for one in attempts)
    of = f" of {moment.steps}" if moment.steps else ""
    more = f" in {len(attempts)} attempts" if len(attempts) > 1 else ""
    rows = [
        ("state", state["state"] + (f": {state['cause']}" if state.get("cause") else "")),
        ("steps", f"{moment.step}{of}"),
        ("began", str(state.get("created", ""))),
        ("took", live.duration(seconds or moment.elapsed) + more),
        ("run", str(run.path)),
    ]
    if state.get("waived"):
        rows.append(("waived", ", ".join(state["waived"])))
    return rows


def _verdict(told: Mapping[str, Any], *, bare: bool = False) -> str:
    if not told:
        return _said("The run has not been judged since its last step; `recipes judge` does.")
    words = verdict.sentence(told["passed"], bare=bare)
    rows = []
    for one in told["judgements"]:
        kind, step = escape(one["outcome"]), "" if one["step"] is None else str(one["step"])
        source = one["source"] if kind in ("fail", "warn") else ""
        cells = "".join(map(_cell, (one["rule"], one["sentence"], step, source)))
        rows.append(f'<tr><td class="{kind}">{kind}</td>{cells}</tr>')
    head = "<tr><th></th><th>rule</th><th>what it found</th><th>step</th><th>threshold from</th></tr>"
    kind = "pass" if told["passed"] else "fail"
    return f'<p class="{kind}">{escape(words)}</p><table>{head}{"".join(rows)}</table>'


def _cell(text: str) -> str:
    return f"<td>{escape(masking.mask(text))}</td>"


def _curves(found: metrics.Metrics, title: str, steps: int | None, dpi: int) -> str:
    if not len(found.table):
        return _said("No step was made.")
    images = [
        drawing.png(curves.figure(found, theme=theme, title=title, total_steps=steps), dpi=dpi)  # type: ignore[arg-type]
        for theme in ("light", "dark")
    ]
    return _picture(*images, curves.describe(found))


def _picture(light: bytes, dark: bytes, words: str) -> str:
    """A picture in two forms, of which the reader's own preference shows one."""
    one, other = (f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}" for data in (light, dark))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{other}">'
    image = f'<img width="960" alt="{escape(words, quote=True)}" src="{one}">'
    return f"<picture>{source}{image}</picture>" + page.folded("the picture in words", _said(words))


def _diagnosis(run: Run) -> str:
    from recipes import diagnosis

    try:
        found = diagnosis.diagnose(run)
    except RecipeError as fault:
        return _said(str(fault))
    return _why(found)


def _why(found: Any) -> str:
    (_, sentence), *rows = found.rows()
    quoted = [words.removeprefix("| ") for _, words in rows if words.startswith("| ")]
    rest = [row for row in rows if row[0] not in ("ignore", "run") and not row[1].startswith("| ")]
    return _said(sentence) + (_quoted("\n".join(quoted)) if quoted else "") + _table(("", ""), rest)


def _own(run: Run, name: str) -> str:
    """The settings of recipe.yaml that are not those of the recipe of that name here and now."""
    from recipes import params
    from recipes.provenance import recorded

    if (run.path / "rehearsal.json").is_file():
        return _said("A rehearsal: what it did with each setting of its recipe stands in rehearsal.json of the run.")
    try:
        then = dict(params.flatten(recorded(run)[0]))
        now_here = dict(params.flatten(params.to_dict(params.compose(name).recipe)))
    except (OSError, ValueError, KeyError) as fault:  # RecipeError is a ValueError
        return _said(f"Not told: {fault}")
    own = ("run_dir", "work", "recipe", "checkpoint.directory")
    rows = [
        (key, _value(now_here.get(key)), _value(then.get(key)))
        for key in sorted({*then, *now_here})
        if then.get(key) != now_here.get(key) and key not in own
    ]
    return _table(("key", "recipe", "run"), rows) if rows else _said("Nothing.")


def _value(value: Any) -> str:
    text = "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"


def _exports(told: Mapping[str, Any]) -> str:
    checks, trouble = told.get("checks") or {}, told.get("trouble") or {}
    if not checks and not trouble:
        return _said("An export is due, and there is none.") if told.get("due") else ""
    rows = [
        ("complete" if one["passed"] else "INCOMPLETE", f"{one['found']} of {one['expected']} tensors", path)
        for path, one in checks.items()
    ]
    return _table(("", "", "export"), rows + [("not compared", why, path) for path, why in trouble.items()])


def _rollouts(path: Path) -> str:
    from recipes import rollouts

    try:
        found = rollouts.folders(path)
        return rollouts.show(path, step=max(found), worst=2, best=2, flagged=2).html()
    except RecipeError:
        return ""


def _provenance(told: Mapping[str, Any]) -> str:
    """What ran, on what, with what: versions, commits, hardware, model and data. The packages are folded."""
    if not told.get("gathered"):
        return _said("Not recorded.")
    told = masking.mask_tree(dict(told)) | {"packages": told.get("packages") or {}}
    packages = told["packages"]
    machine = told.get("hardware") or {}
    hardware = [str(machine[key]) for key in ("host", "processor", "system") if machine.get(key)]
    if isinstance(machine.get("devices"), list):
        names = sorted({str(one.get("name")) for one in machine["devices"]})
        hardware.append(f"{len(machine['devices'])} devices ({', '.join(names)})")
    if isinstance(machine.get("memory"), int):
        hardware.append(f"{machine['memory'] / 2**30:.0f} GiB")
    rows = [
        ("gathered", ", on ".join(filter(None, [str(told["gathered"]), told.get("gathered_on")]))),
        ("workbook", str(told.get("workbook", ""))),
        ("hardware", ", ".join(hardware)),
        ("python", str((told.get("interpreter") or {}).get("python", ""))),
        ("packages", ", ".join(f"{name} {packages[name]}" for name in _PACKAGES if name in packages)),
    ]
    commits = differences._commits(told.get("repositories") or {})
    rows += [("commit", f"{name}: {words}") for name, words in commits.items()]
    for part in ("model", "data"):
        prints = differences._prints(told.get(part) or {})
        rows += [(part, f"{key}: {words}") for key, words in prints.items() if "/" not in key]  # not file by file
    rows += [("not gathered", str(fault)) for fault in told.get("faults") or ()]
    shown = _table(("", ""), [row for row in rows if row[1]])
    if packages:
        everything = _table(("package", "version"), sorted(packages.items()))
        shown += page.folded(f"all {len(packages)} packages", everything)
    return shown


# -------------------------------------------------------------------------------------------------------- the document

Section = tuple[str, str | Callable[[int], str]]
"""A heading and its HTML, or what draws it at some dots an inch. An empty one is left out."""


def _document(title: str, about: str, sections: Sequence[Section]) -> str:
    """The file. Raises RecipeError if even plain pictures do not fit into MOST bytes."""
    for dpi in (_SHARP, _PLAIN):
        text = _assembled(title, about, sections, dpi)
        if len(text.encode()) <= MOST:
            return text
    raise RecipeError(f"The report would have {len(text.encode()):,} bytes, more than {MOST:,}: give fewer sources.")


def _assembled(title: str, about: str, sections: Sequence[Section], dpi: int) -> str:
    body = []
    for heading, inner in sections:
        html = inner if isinstance(inner, str) else inner(dpi)
        if html:
            body.append(f'<section><h2>{escape(heading)}</h2><div class="scroll">{html}</div></section>')
    title, about = masking.mask(title), masking.mask(about)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f'<header><h1>{escape(title)}</h1><p class="about">{escape(about)}</p></header>'
        f'<main>{"".join(body)}</main><footer><p class="about">Written {escape(now())} by recipes report.</p></footer>'
        "</body></html>\n"
    )
