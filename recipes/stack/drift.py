"""Where a checkout's files differ from the table, or from each other, in what to clone and install.

A stack is one generation on one kind of device. What is about another one (a Dockerfile built on another CANN or on
CUDA, a document that never speaks of NPUs) is counted, not compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import InvalidVersion, Version

from recipes.errors import RecipeError, nearest
from recipes.stack import conflict, doc_mentions, refs, requirement_mentions, shell_mentions
from recipes.stack.mentions import Mention, Names, Source, names, sources
from recipes.stack.table import Repository, Stack

# Verdict → severity and meaning. Errors make the exit code 1.
VERDICTS = {
    "branch_for_tag": ("error", "a branch where a tag was meant"),
    "other_kind": ("error", "the same version under another kind of ref"),
    "other_ref": ("error", "another ref than the table's"),
    "other_commit": ("error", "another commit than the table's"),
    "other_version": ("error", "another version than the table's"),
    "excludes": ("error", "a specifier that the table's version does not satisfy"),
    "unpinned": ("error", "a moving head: nothing says which commit"),
    "shallow": ("error", "a cut-off history of what must be cloned whole"),
    "no_ref": ("error", "not a legal name of a ref"),
    "disagree": ("error", "two places differ, and the table has no such thing"),
    "other_cann": ("error", "a CANN version beside a file of another one"),
    "no_file": ("error", "a link to a file the checkout does not have"),
    "other_device": ("error", "A2 and A3 swapped"),
    "settled": ("warning", "excludes the table's version, which the table knows and overrides"),
    "moving": ("warning", "the table's branch, without its commit"),
}

_IMAGE = re.compile(r"(?P<repository>[\w./-]*\bcann):(?P<cann>\d+\.\d+\.\w+)-(?P<device>910b|a3)\b", re.IGNORECASE)
_SOC = re.compile(r"SOC_VERSION[=\s\"']+(?P<soc>ascend\w+)", re.IGNORECASE)
_DOCKERFILE = re.compile(r"Dockerfile[.\w-]*?_(?P<cann>\d+\.\d+\.\w+?)_(?P<device>a2|a3)[\w.-]*", re.IGNORECASE)
# What only something about Ascend NPUs speaks of; "Ascend" alone stands in every list of supported devices.
_NPU = re.compile(r"torch[_-]npu|vllm[_-]ascend|MindSpeed|\bCANN\b|_npu\b|\bascendhub/", re.IGNORECASE)
_BLOB = re.compile(r"/blob/(?!(?:main|master)/)")
_CANN_CELL = re.compile(r"\d+\.\d+\.(?:\d+|rc\d+)", re.IGNORECASE)
DEVICES = {"910b": "a2", "a2": "a2", "a3": "a3"}


@dataclass(frozen=True)
class Drift:
    """One difference: where, of what, what stands there, what the table wants, the verdict and the reason."""

    file: str
    line: int
    subject: str
    found: str
    wanted: str
    verdict: str
    why: str

    @property
    def severity(self) -> str:
        return VERDICTS[self.verdict][0]


@dataclass(frozen=True)
class Report:
    """All differences, and what was looked at."""

    stack: str
    root: str
    drifts: tuple[Drift, ...]
    files: int
    mentions: int
    elsewhere: tuple[str, ...]  # files that are about another generation or device

    @property
    def errors(self) -> int:
        return sum(d.severity == "error" for d in self.drifts)

    def to_dict(self) -> dict[str, Any]:
        rows = [{**asdict(d), "severity": d.severity, "meaning": VERDICTS[d.verdict][1]} for d in self.drifts]
        return {**asdict(self), "errors": self.errors, "drifts": rows}


def look(stack: Stack, root: Path, exclude: Iterable[str] = ()) -> Report:
    """Compare the files under `root` with `stack` and with each other.

    Raises RecipeError when `root` is no folder, or the stack has no repositories to compare with.
    """
    if not stack.repositories:
        raise RecipeError(f"Stack {stack.name} has no repositories: there are no refs to compare with.")
    if not root.is_dir():
        raise RecipeError(f"{root} is no folder to look for refs in.")
    known = names(stack)
    files = list(sources(root, exclude))
    present = {PurePosixPath(source.path).name for source in files if source.kind == "dockerfile"}
    mine = [source for source in files if _is_about(source, stack)]
    others = tuple(sorted({source.path for source in files} - {source.path for source in mine}))
    mentions = [mention for source in mine for mention in _mentions(source, known, stack.cann)]
    drifts = [drift for mention in mentions for drift in _against_table(mention, stack)]
    drifts = _with_others(drifts, mentions)
    drifts += _among_themselves(mentions, known)
    drifts += [drift for source in mine for drift in (*_images(source), *_tags_page(source, present))]
    ordered = sorted(dict.fromkeys(drifts), key=lambda d: (d.file, d.line, d.subject))
    return Report(stack.name, str(root), tuple(ordered), len(files), len(mentions), others)


# ----------------------------------------------------------------------------------------------- what the files say


def _mentions(source: Source, known: Names, cann: str) -> list[Mention]:
    if source.kind == "document":
        return doc_mentions.find(source, known, cann)
    if source.kind in ("shell", "dockerfile"):
        # Recipes keep their table of refs in the comment at the top.
        return [*shell_mentions.find(source, known), *doc_mentions.in_tables_of(source, known, cann)]
    return requirement_mentions.find(source, known)


def _is_about(source: Source, stack: Stack) -> bool:
    """Say whether a file is about this stack: its base image, or the CANN it names, or that it speaks of NPUs at all.

    Requirement files and package metadata count always: they are for every device unless their name says otherwise.
    """
    if source.kind == "dockerfile":
        bases = [line for line in source.text.splitlines() if _is_from(line)]
        named = [m["cann"].lower() for line in bases if (m := _IMAGE.search(line))]
        told = named or any("$" not in line and re.match(r"\s*FROM\s", line, re.IGNORECASE) for line in bases)
        return stack.cann.lower() in named if told else bool(_NPU.search(source.text))
    if source.kind == "shell":
        named = {cann.lower() for cann in re.findall(r"\bcann[-:](\d+\.\d+\.\w+)", source.text, re.IGNORECASE)}
        return stack.cann.lower() in named if named else bool(_NPU.search(source.text) or _NPU.search(source.path))
    if source.kind == "document":
        return bool(_NPU.search(source.text) or _NPU.search(source.path))
    return not re.search(r"cuda|gpu|rocm|cpu|tpu|xpu", source.path, re.IGNORECASE)


def _is_from(line: str) -> bool:
    return bool(re.match(r"\s*(FROM|ARG)\s", line, re.IGNORECASE))


# ------------------------------------------------------------------------------------------------ against the table


def _against_table(mention: Mention, stack: Stack) -> Iterator[Drift]:
    def drift(wanted: str, verdict: str, why: str) -> Drift:
        found = mention.text or "no ref"
        return Drift(mention.file, mention.line, mention.subject, found, wanted, verdict, why)

    if mention.what == "ref" and (why := refs.fault(mention.text)):
        yield drift("a ref", "no_ref", why)
    elif mention.subject in stack.repositories:
        repository = stack.repositories[mention.subject]
        verdict, why = _repository(mention, repository, stack)
        if verdict:
            yield drift(_wanted(repository), verdict, why)
    elif mention.subject in stack.packages:
        verdict, why = _package(mention, stack.packages[mention.subject], stack)
        if verdict:
            yield drift(stack.packages[mention.subject], verdict, why)
    elif mention.subject == "python" and mention.what in ("version", "specifier"):
        if not conflict.possible([_specifier(mention), f"=={stack.python}.*"]):
            yield drift(stack.python, "other_version", f"the images of CANN {stack.cann} have Python {stack.python}")
    elif _moves(mention) and not mention.file.endswith((".md", ".rst")):
        # A document clones data sets and examples too; what a script or an image clones, it runs.
        yield drift("a tag or commit", "unpinned", "what it brings depends on the day; the table does not have it")


def _moves(m: Mention) -> bool:
    return m.what == "head" or (m.what == "ref" and m.text in refs.HEADS)


def _repository(m: Mention, r: Repository, stack: Stack) -> tuple[str, str]:
    """Return verdict and reason for what is said of a repository; an empty verdict where it is as in the table."""
    if m.what == "shallow":
        return ("shallow", r.why) if r.depth == "full" and r.name != "vllm-ascend" else ("", "")
    if _moves(m):
        if m.where in ("table", "prose") and m.text == r.ref:
            return "", ""
        return "unpinned", f"clones whatever its default branch is today; the table has {r.kind} {r.ref}"
    if m.what == "specifier":
        return _versioned(m, r.version or refs.version_in(r.ref), r.distribution or r.name, stack)
    if m.what == "commit":
        same = not r.commit or r.commit.startswith(m.text.lower())
        return ("", "") if same else ("other_commit", f"the table has {r.commit} ({r.kind} {r.ref})")
    if m.text == r.ref:
        if r.kind == "branch" and m.where in ("clone", "checkout"):
            return "moving", f"a branch goes on; the stack was put together at {r.commit}"
        return "", ""
    version = refs.version_in(r.ref) or r.version
    if m.what == "version":
        same = m.text in (version, r.version)
        return ("", "") if same else ("other_version", f"the table has {r.kind} {r.ref}")
    kind = refs.kind_of(m.text, branches=r.branches, tags=r.tags)
    if kind and kind != r.kind and refs.version_in(m.text) == version:
        verdict = "branch_for_tag" if (kind, r.kind) == ("branch", "tag") else "other_kind"
        return verdict, f"{m.text} is a {kind} and the table wants the {r.kind} {r.ref}. {r.why}"
    return "other_ref", f"the table has {r.kind} {r.ref}{f', and {m.text} is a {kind}' if kind == 'branch' else ''}"


def _package(m: Mention, wanted: str, stack: Stack) -> tuple[str, str]:
    if m.what in ("head", "ref", "commit"):
        moving = _moves(m)
        why = "comes from a moving head of its repository" if moving else "comes from its repository"
        return ("unpinned" if moving else "other_ref"), f"{why}; the table has version {wanted}"
    if m.what == "shallow":
        return "", ""
    return _versioned(m, wanted, m.subject, stack)


def _versioned(m: Mention, wanted: str, package: str, stack: Stack) -> tuple[str, str]:
    """Compare a version or specifier with the table's. A conflict the table knows and settles is only a warning."""
    if not wanted:
        return "", ""
    try:
        if conflict.possible([_specifier(m), wanted]):
            return "", ""
    except RecipeError:
        return "", ""  # text that only looks like a version
    for entry in stack.conflicts:
        if entry.package == package and m.where in ("requirement", "pip") and _known_wish(m.text, entry.wants.values()):
            return "settled", entry.how
    if m.what == "version":
        return "other_version", f"the table has {wanted}"
    return "excludes", f"{m.text} leaves out {wanted}"


def _known_wish(text: str, wishes: Iterable[str]) -> bool:
    return any(conflict.specifier(text) == conflict.specifier(wish) for wish in wishes)


def _specifier(m: Mention) -> str:
    return m.text if m.what == "specifier" else m.text.removeprefix("v")


def _wanted(r: Repository) -> str:
    return r.commit[:12] if r.kind == "commit" else f"{r.ref}{f' at {r.commit[:12]}' if r.commit else ''}"


# --------------------------------------------------------------------------------------------- against one another


def _with_others(drifts: list[Drift], mentions: list[Mention]) -> list[Drift]:
    """Add to each difference where the checkout says otherwise, so that one sees which of its files is behind."""
    said: dict[str, dict[str, Mention]] = defaultdict(dict)
    for m in mentions:
        if m.text and m.what != "shallow":
            said[m.subject].setdefault(m.text, m)
    told = []
    for d in drifts:
        others = [m for text, m in said[d.subject].items() if text != d.found and d.verdict != "settled"]
        elsewhere = "; ".join(f"{m.file}:{m.line} says {m.text}" for m in others[:3])
        told.append(Drift(**{**asdict(d), "why": f"{d.why} ({elsewhere})" if elsewhere else d.why}))
    return told


def _among_themselves(mentions: list[Mention], known: Names) -> Iterator[Drift]:
    """Yield what the table does not have and the checkout says differently; what it says most often counts as meant."""
    spoken: dict[str, list[Mention]] = defaultdict(list)
    for m in mentions:
        if (
            m.subject not in known.known.values()
            and m.what in ("ref", "commit")
            and m.where in ("clone", "checkout", "pip")
        ):
            spoken[m.subject].append(m)
    for subject, said in spoken.items():
        counted = Counter(m.text for m in said).most_common()
        if len(counted) < 2:
            continue
        meant = next(m for m in said if m.text == counted[0][0])
        for m in said:
            if m.text != meant.text:
                why = f"{meant.file}:{meant.line} says {meant.text}"
                yield Drift(m.file, m.line, subject, m.text, meant.text, "disagree", why)


def _images(source: Source) -> Iterator[Drift]:
    """Yield Dockerfiles whose name, base image and SOC_VERSION are of different devices or CANN versions."""
    named = _DOCKERFILE.search(PurePosixPath(source.path).name)
    if source.kind != "dockerfile":
        return
    device = named["device"].lower() if named else ""
    for number, line in enumerate(source.text.splitlines(), 1):
        base = _IMAGE.search(line) if _is_from(line) else None
        if base:
            its = DEVICES[base["device"].lower()]
            if device and its != device:
                why = f"the file is called {PurePosixPath(source.path).name}"
                yield Drift(source.path, number, "device", base["device"], device.upper(), "other_device", why)
            if named and base["cann"].lower() != named["cann"].lower():
                why = f"the file is called {PurePosixPath(source.path).name}"
                yield Drift(source.path, number, "CANN", base["cann"], named["cann"], "other_cann", why)
            device = device or its
        soc = _SOC.search(line)
        if soc and device and ("910b" in soc["soc"].lower()) != (device == "a2"):
            why = f"SOC_VERSION is not one of an {device.upper()}"
            yield Drift(source.path, number, "device", soc["soc"], device.upper(), "other_device", why)


def _tags_page(source: Source, present: set[str]) -> Iterator[Drift]:
    """Yield rows that name a device or CANN beside a Dockerfile of another one, or a Dockerfile that is not there."""
    if source.kind != "document":
        return
    for row in (row for table in doc_mentions.tables(source) for row in table):
        text = " ".join(row.cells)
        linked = _DOCKERFILE.search(text)
        if not linked:
            continue
        # A link into another branch names a file this checkout need not have.
        if linked[0] not in present and not _BLOB.search(text):
            yield Drift(
                source.path,
                row.line,
                "Dockerfile",
                linked[0],
                "a file that is there",
                "no_file",
                _near(linked[0], present),
            )
        for index, cell in enumerate(row.cells):
            shown, head = doc_mentions.plain(cell), row.heads[index] if index < len(row.heads) else ""
            device = DEVICES.get(shown.lower())
            if device and device != linked["device"].lower():
                why = f"the row links {linked[0]}"
                yield Drift(source.path, row.line, "device", shown, linked["device"], "other_device", why)
            if "cann" in head.lower() and _CANN_CELL.fullmatch(shown) and not _same_cann(shown, linked["cann"]):
                why = f"the row links {linked[0]}"
                yield Drift(source.path, row.line, "CANN", shown, linked["cann"], "other_cann", why)


def _same_cann(one: str, other: str) -> bool:
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one.lower() == other.lower()


def _near(name: str, present: set[str]) -> str:
    return f"no file of that name in the checkout{nearest(name, sorted(present)).removesuffix('.')}"
