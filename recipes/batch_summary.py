"""What became of a batch: one table as HTML (with curves), CSV and JUnit."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from recipes import live, metrics, page
from recipes.batch import Batch
from recipes.batch_run import Forecast, Outcome
from recipes.run.directory import write_text

HTML, CSV, JUNIT = "summary.html", "summary.csv", "junit.xml"
# Pixels a thumbnail is wide: three beside each other in a window, and numbers that can still be read.
WIDTH = 460
COLUMNS = (
    "run",
    "recipe",
    "result",
    "state",
    "verdict",
    "attempts",
    "steps",
    "reward first",
    "reward last",
    "seconds",
    "devices",
    "device-hours",
    "cause",
    "directory",
)
REWARD = "critic/rewards/mean"


def write(batch: Batch, outcomes: Sequence[Outcome], root: Path) -> None:
    """Write summary.html, summary.csv and junit.xml into the directory of a batch. Raises OSError."""
    rows = [row(outcome, root) for outcome in outcomes]
    write_text(root / CSV, as_csv(rows))
    write_text(root / JUNIT, junit(batch, outcomes))
    write_text(root / HTML, html(batch, outcomes, rows, root))


def row(outcome: Outcome, root: Path) -> dict[str, Any]:
    """Return one line of the table: a value for each of COLUMNS, None where there is none."""
    first = last = steps = None
    if outcome.run is not None:
        with contextlib.suppress(OSError, ValueError):
            table = metrics.of_run(outcome.run.path).table
            steps = int(table.index.max()) if len(table) else 0
            rewards = table[REWARD].dropna() if REWARD in table else ()
            if len(rewards):
                first, last = float(rewards.iloc[0]), float(rewards.iloc[-1])
    told = outcome.state
    judged = outcome.verdict
    values = (
        outcome.item.name,
        outcome.item.recipe,
        outcome.what + (" (earlier)" if outcome.skipped else ""),
        told.get("state", ""),
        "" if judged is None else "pass" if judged.passed else "fail",
        len(told.get("attempts", ())),
        steps,
        first,
        last,
        round(outcome.seconds, 1),
        outcome.item.devices,
        round(outcome.device_hours, 4),
        outcome.cause,
        os.path.relpath(outcome.run.path, root) if outcome.run is not None else "",
    )
    return dict(zip(COLUMNS, values, strict=True))


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table as CSV. A text that a spreadsheet would take for a formula gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for each in rows:
        texts = {k: f"'{v}" if isinstance(v, str) and v[:1] in ("=", "+", "-", "@") else v for k, v in each.items()}
        writer.writerow(texts)
    return out.getvalue()


def junit(batch: Batch, outcomes: Sequence[Outcome]) -> str:
    """Return a JUnit report, a test case a run.

    A verdict that fails is a failure, a run that did not finish an error, one that was not started skipped.
    """
    import xml.etree.ElementTree as tree

    suite = tree.Element("testsuite", name=batch.name, tests=str(len(outcomes)))
    counts = dict.fromkeys(("failure", "error", "skipped"), 0)
    for each in outcomes:
        time = f"{each.seconds:.1f}"
        case = tree.SubElement(suite, "testcase", classname=batch.name, name=each.item.name, time=time)
        judgements = [f"{j.outcome} {j.rule}: {j.sentence}" for j in each.verdict.judgements] if each.verdict else []
        if each.what != "passed":
            judged = each.state.get("state") == "finished" and each.verdict is not None
            kind = "skipped" if each.what == "not run" else "failure" if judged else "error"
            counts[kind] += 1
            tree.SubElement(case, kind, message=_printable(each.cause or each.what)).text = _printable(
                "\n".join([each.cause, *(words for words in judgements if words.startswith("fail"))])
            )
        if judgements:
            tree.SubElement(case, "system-out").text = _printable("\n".join(judgements))
    for kind, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(counts[kind]))
    suite.set("time", f"{sum(each.seconds for each in outcomes):.1f}")
    tree.indent(suite)
    return tree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def html(batch: Batch, outcomes: Sequence[Outcome], rows: Sequence[dict[str, Any]], root: Path) -> str:
    """Return the summary as one page that needs no other file. `rows` are those of `row`."""
    shown = [c for c in COLUMNS if c != "directory"]
    body = [[_cell(name, each[name]) for name in shown] for each in rows]
    title = f"{batch.name}: {verdict_line(outcomes)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        page.paragraph(batch.file.title) if batch.file.title else "",
        _table(shown, body, [each.what for each in outcomes]),
        '<div class="curves">',
        *(_curve(each, root) for each in outcomes if each.run is not None),
        "</div>",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    style = f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>'
    return style + "".join(parts) + "</body></html>\n"


_STYLE = (
    ":root{color-scheme:light dark;--paper:#fff;--ink:#222;--muted:#666;--rule:#ddd;--passed:#00664b;--failed:#b03a00}"
    "@media(prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--muted:#9198a1;--rule:#272d36;"
    "--passed:#2cb68d;--failed:#ff9b72}}"
    "body{font:14px system-ui,sans-serif;margin:24px;color:var(--ink);background:var(--paper)}"
    "h1{font-size:20px;font-weight:600}a{color:inherit}"
    "table{border-collapse:collapse}td,th{text-align:left;padding:3px 14px 3px 0;vertical-align:top;"
    "border-bottom:1px solid var(--rule)}th{font-weight:600;color:var(--muted)}td:first-child{white-space:nowrap}"
    ".number{text-align:right;font-variant-numeric:tabular-nums}.passed{color:var(--passed)}"
    ".failed{color:var(--failed);font-weight:600}"
    ".curves{display:flex;flex-wrap:wrap;gap:20px;margin-top:24px}figure{margin:0}figcaption{padding:0 0 4px}"
    f"figure img{{width:{WIDTH}px;max-width:100%;border:1px solid var(--rule)}}.scroll{{overflow-x:auto}}"
)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], results: Sequence[str]) -> str:
    numbers = {header.index(n) for n in header if n not in ("run", "recipe", "result", "state", "verdict", "cause")}
    head = "".join(
        f'<th class="{"number" if n in numbers else ""}">{escape("time" if name == "seconds" else name)}</th>'
        for n, name in enumerate(header)
    )
    body = ""
    for cells, result in zip(rows, results, strict=True):
        kinds = ["number" if n in numbers else result if header[n] == "result" else "" for n in range(len(cells))]
        body += "<tr>" + "".join(f'<td class="{k}">{escape(c)}</td>' for k, c in zip(kinds, cells, strict=True))
        body += "</tr>"
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "seconds":
        return live.duration(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _curve(outcome: Outcome, root: Path) -> str:
    """The curves of a run, light and dark, as they were recorded, with what they say in words."""
    place = outcome.run.curves / "curves.png"
    try:
        light, words = _thumbnail(place)
        dark, _ = _thumbnail(place.with_name("curves-dark.png"))
    except (OSError, ValueError):
        return ""
    link = quote(os.path.relpath(place, root))
    words = escape(words or f"curves of {outcome.item.name}", quote=True)
    picture = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    picture += f'<img alt="{words}" src="{light}"></picture>'
    return f'<figure><figcaption>{escape(outcome.item.name)}</figcaption><a href="{link}">{picture}</a></figure>'


def _thumbnail(path: Path) -> tuple[str, str]:
    """The picture at `path` as a small PNG in a URL, at twice the width it is shown at, and its description.

    Raises OSError.
    """
    import base64

    from PIL import Image  # matplotlib's own requirement

    with Image.open(path) as whole:
        words = str(whole.info.get("Description", ""))
        small = whole.convert("RGB")
    small.thumbnail((2 * WIDTH, 4 * WIDTH))
    out = io.BytesIO()
    # 64 colours are enough for lines and text, and a quarter of the size.
    small.quantize(64).save(out, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}", words


def verdict_line(outcomes: Sequence[Outcome]) -> str:
    """Return `5 of 8 passed, 2 failed, 1 not run; 0.31 device-hours`."""
    counts = {what: sum(o.what == what for o in outcomes) for what in ("passed", "failed", "not run")}
    words = f"{counts['passed']} of {len(outcomes)} passed"
    words += "".join(f", {counts[what]} {what}" for what in ("failed", "not run") if counts[what])
    return f"{words}; {sum(o.device_hours for o in outcomes):.3g} device-hours"


def text(outcomes: Sequence[Outcome]) -> str:
    """Return the table for a terminal."""
    rows = [
        (o.item.name, o.what + (" (earlier)" if o.skipped else ""), live.duration(o.seconds), o.cause) for o in outcomes
    ]
    return columns(("run", "result", "time", ""), rows)


def plan_text(batch: Batch, told: Forecast, cap: float | None) -> str:
    """Return what a batch would do, for a terminal: each run, how long by earlier runs, and its device-hours."""
    rows = []
    for item, found, guess in told.rows:
        what = {"done": "finished: skipped", "running": "runs: waits for it", "resumable": f"resumes: {found.why}"}
        seconds = None if found.what == "done" else guess.seconds
        rows.append(
            (
                item.name,
                what.get(found.what, "runs" + (f" in {found.run.path.name} ({found.why})" if found.why else "")),
                "" if found.what == "done" else "?" if seconds is None else live.duration(seconds),
                "" if found.what == "done" else guess.source,
                str(item.devices),
                "" if found.what == "done" else "?" if seconds is None else f"{item.devices * seconds / 3600:.3g}",
            )
        )
    lines = [columns(("run", "", "time", "by", "devices", "device-hours"), rows)]
    at_least = "at least " if told.unknown else ""
    where = "jobs of a Ray cluster" if any(i.on_ray for i in batch.items) else "on this machine"
    lines.append(f"{told.workers} at a time, {where}: {at_least}{live.duration(told.wall)}")
    spent = f"{told.spent:.3g} spent, " if told.spent else ""
    limit = "" if cap is None else f", cap {cap:g}"
    lines.append(f"device-hours: {spent}{at_least}{told.to_come:.3g} to come{limit}")
    if told.why_workers:
        lines.append(told.why_workers)
    return "\n".join(lines)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts, columns two blanks apart."""
    whole = [header, *rows]
    widths = [max(len(cells[n]) for cells in whole) for n in range(len(header))]
    return "\n".join("  ".join(f"{c:{w}}" for c, w in zip(cells, widths, strict=True)).rstrip() for cells in whole)


def _printable(text: str) -> str:
    """XML has no place for control characters, and causes come from logs."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
