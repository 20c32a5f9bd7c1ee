"""Small pieces of HTML for notebooks: everything from outside is escaped, and themes decide the colours."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

# JupyterLab's own variables first, so that a light and a dark theme both look right; then a neutral value.
_STYLE = (
    "<style>.rw{font-family:var(--jp-content-font-family,system-ui,sans-serif);font-size:13px;max-width:1000px}"
    ".rw table{border-collapse:collapse;margin:6px 0}"
    ".rw td,.rw th{text-align:left!important;padding:2px 14px 2px 0!important;vertical-align:top;"
    "background:none!important;border:0}"
    ".rw th{font-weight:600;opacity:.7}"
    ".rw code,.rw pre{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px;background:none}"
    ".rw pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0;opacity:.85;max-height:16em;overflow:auto}"
    ".rw .bar{height:6px;border-radius:3px;background:rgba(128,128,128,.25);margin:6px 0;max-width:960px}"
    ".rw .bar i{display:block;height:6px;border-radius:3px;background:#0072b2}"
    ".rw .dots span{margin-right:16px;white-space:nowrap}.rw .dots b{margin-right:5px}.rw .dots .fail b{color:#d1242f}"
    ".rw .dots .warn b{color:#c77a00}.rw .dots .pass b,.rw .dots .info b{color:#2c974b}.rw .dots .wait b{color:#848d97}"
    ".rw img{max-width:100%}.rw .dark{display:none}"
    "body[data-jp-theme-light=false] .rw .dark{display:inline}"
    "body[data-jp-theme-light=false] .rw .light{display:none}</style>"
)


def block(*parts: str) -> str:
    """Return parts of HTML as one styled block. JupyterLab would take what stands between two `$` for a formula."""
    return f'{_STYLE}<div class="rw mathjax_ignore">{"".join(parts)}</div>'


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; every cell is text and is escaped. Long words, such as paths, may break: no table is too wide."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_breakable(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


LONG = 24  # characters of a word that must be able to break


def _breakable(text: str) -> str:
    """Return text escaped; its long words may break where people would break them: after a slash, a dot, a comma."""
    pieces = re.split(r"(\s+)", text)
    return "".join(
        "<wbr>".join(map(escape, re.findall(r"[/.,:=_-]*[^/.,:=_-]{0,64}[/.,:=_-]*", w)[:-1]))
        if len(w) > LONG
        else escape(w)
        for w in pieces
    )


def verbatim(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def folded(title: str, inner: str) -> str:
    """Return HTML that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def progress(done: float) -> str:
    """Return a bar; `done` is a share from 0 to 1."""
    return f'<div class="bar"><i style="width:{100 * min(1.0, max(0.0, done)):.1f}%"></i></div>'


def dots(lights: Iterable[tuple[str, str, str]]) -> str:
    """Return coloured dots in a row, each (fail, warn, pass, info or wait; its words; what shows on hovering)."""
    shown = (
        f'<span class="{escape(kind)}" title="{escape(more, quote=True)}"><b>●</b>{escape(words)}</span>'
        for kind, words, more in lights
    )
    return f'<p class="dots">{" ".join(shown)}</p>'


def picture(light: bytes, dark: bytes, words: str) -> str:
    """Return a PNG in a light and a dark form, of which the theme shows one; `words` say what it shows."""
    images = []
    for kind, data in (("light", light), ("dark", dark)):
        source = base64.b64encode(data).decode("ascii")
        images.append(f'<img class="{kind}" alt="{escape(words, quote=True)}" src="data:image/png;base64,{source}">')
    return "".join(images)
