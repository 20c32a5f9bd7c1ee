"""Reads a bash script for the verl launch in it and the values its variables would have. Nothing is ever executed.

tree-sitter gives the syntax tree; the small part of bash that launch scripts are made of (assignments, arrays,
expansions, arithmetic, tests, for, case, functions) is evaluated over it. What the text alone does not tell, such as
$(date), an unset variable or whether a file exists, is marked in the values it reaches and noted, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from recipes.errors import RecipeError

# A script is a few kilobytes; these keep a hostile one from taking the machine.
MAX_BYTES = 1_000_000
MAX_STEPS = 50_000
MAX_TEXT = 1_000_000

# Always set by a login, so `${HOME:-x}` is not x; their values are the machine's that runs the script.
ALWAYS_SET = ("HOME", "PWD", "USER", "HOSTNAME", "PATH", "SHELL")

# What an exported recipe (recipes.export) calls its two places.
PLACES = {"RECIPES_WORK": "work", "RUN_DIR": "run_dir"}

# Commands that change neither variables nor the launch.
HARMLESS = frozenset(("set", "shopt", "echo", "printf", ":", "true", "mkdir", "cd", "pushd", "popd", "ulimit", "sleep"))
HARMLESS |= {"wait", "tee", "date", "ls", "cat", "touch", "trap", "hash", "which", "type", "umask", "clear", "chmod"}

_MARK = re.compile(r"__unknown_(\d+)__")


class Unknown(NamedTuple):
    """A piece of text that only a run of the script could tell. `variable`: the environment variable it is."""

    source: str
    line: int
    variable: str = ""


class Note(NamedTuple):
    """A line of the script that was not carried over, and why."""

    line: int
    source: str
    reason: str


@dataclass(frozen=True)
class Launch:
    """A command that starts verl: its Python module, its arguments, and the variables the script exports to it."""

    line: int
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    condition: str = ""  # the block it stands in, when whether that runs is not known


@dataclass(frozen=True)
class Reading:
    """What a script says. Texts hold marks where something is unknown; `unknowns` says what each mark stands for."""

    launches: tuple[Launch, ...]
    unknowns: tuple[Unknown, ...]
    notes: tuple[Note, ...]
    assumed: Mapping[str, str]  # variables taken as unset, with the default the script gives them
    doubtful: Mapping[str, int]  # variables a block that was not followed may change, and its line
    prepare: tuple[str, ...]  # the module and arguments of `python -m recipes.…` before the launch


def read(text: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Reading:
    """Evaluate a script called with `arguments`, in an environment of which only `variables` is known.

    Raises RecipeError when the text is no script that can be read: too large, too deep, or endless.
    """
    if len(text) > MAX_BYTES:
        raise RecipeError(f"The script has {len(text)} characters: no launch script is that long.")
    if "\0" in text:
        raise RecipeError("The script holds a null byte: it is no text.")
    shell = _Shell(text.encode(), dict(variables or {}), list(arguments))
    try:
        shell.all()
    except RecursionError:
        raise RecipeError("The script is nested too deeply, or a function of it calls itself without end.") from None
    launches = shell.launches or shell.conditional
    return Reading(
        tuple(launches),
        tuple(shell.unknowns),
        tuple(dict.fromkeys(shell.notes)),
        shell.assumed,
        dict(shell.doubts),
        tuple(shell.prepare),
    )


def marks(text: str) -> list[int]:
    """Return the numbers of the unknown pieces in a text, in order."""
    return [int(number) for number in _MARK.findall(text)]


def fill(text: str, piece: Callable[[int], str]) -> str:
    """Return the text with each mark replaced by `piece(number)`."""
    return _MARK.sub(lambda found: piece(int(found[1])), text)


def launch_in(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return (module, arguments) when the words of a command start verl, whatever stands before (ray, torchrun, …)."""
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "-m" and _is_entry(following):
            return following, tuple(words[place + 2 :])
        if word.endswith(".py") and "/" in word and "=" not in word:
            module = ".".join(PurePosixPath(word).with_suffix("").parts)
            found = re.match(r"(?:.*\.)?((?:verl|recipe)\..+)$", module)
            if found and _is_entry(found[1]):
                return found[1], tuple(words[place + 1 :])
    return None


def _is_entry(module: str) -> bool:
    """verl's trainers: main_ppo, fully_async_main, recipe.dapo.main_dapo; not its merger, generation or SFT."""
    last = module.rsplit(".", 1)[-1]
    named = re.fullmatch(r"main_\w+|\w+_main", last) and last not in (
        "main_generation",
        "main_eval",
        "main_generation_server",
    )
    return bool(named) and module.startswith(("verl.", "recipe."))


# ------------------------------------------------------------------------------------------------------ control flow


class _Stop(Exception):
    """`exit`, `return`, `break` and `continue` on their way out; `kind` says which."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


Status = bool | None  # of a command: True, False, or not known


@dataclass
class _Shell:
    """The state of a script as far as its text tells."""

    source: bytes
    given: dict[str, str]
    arguments: list[str]
    variables: dict[str, Any] = field(default_factory=dict)  # str or list[str]
    unset: set[str] = field(default_factory=set)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Any] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    launches: list[Launch] = field(default_factory=list)
    conditional: list[Launch] = field(default_factory=list)
    unknowns: list[Unknown] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, int] = field(default_factory=dict)
    doubtful: dict[str, int] = field(default_factory=dict)
    prepare: list[str] = field(default_factory=list)
    condition: str = ""
    steps: list[int] = field(default_factory=lambda: [0])

    def all(self) -> None:
        self.source, tree = _parse(self.source)
        for node in _errors(tree.root_node):
            self.note(node, "this is not understood as bash")
        with suppress(_Stop):
            self.block(tree.root_node.children)
        if not self.launches and not self.conditional:
            for name, body in self.functions.items():
                if name not in self.called:
                    self.perhaps([[body]], body, f"the function {name}, which nothing calls")

    # ---- statements

    def block(self, nodes: Sequence[Any]) -> Status:
        status: Status = True
        for node in nodes:
            if node.is_named:
                status = self.run(node)
        return status

    def run(self, node: Any, stdin: str | None = None) -> Status:
        self.steps[0] += 1
        if self.steps[0] > MAX_STEPS:
            raise RecipeError(f"line {_line(node)}: the script takes more than {MAX_STEPS} steps; it cannot be read.")
        kind = node.type
        handler = getattr(self, f"do_{kind}", None)
        if handler is None:
            if kind not in ("comment", "ERROR", "heredoc_body", "file_redirect"):
                self.note(node, "this kind of statement is not followed")
            return None
        return handler(node, stdin) if kind in ("command", "redirected_statement") else handler(node)

    def do_compound_statement(self, node: Any) -> Status:
        if node.children[0].type == "((":
            self.note(node, "arithmetic that changes variables is not followed")
            for name in re.findall(r"[A-Za-z_]\w*", _text(node)):
                self.doubtful[name] = _line(node)
            return None
        return self.block(node.children)

    def do_do_group(self, node: Any) -> Status:
        return self.block(node.children)

    def do_subshell(self, node: Any) -> Status:
        inner = self.copy()
        try:
            return inner.block(node.children)
        except _Stop:
            return None

    def do_redirected_statement(self, node: Any, stdin: str | None = None) -> Status:
        body = node.child_by_field_name("body")
        for redirect in node.children_by_field_name("redirect"):
            if redirect.type == "herestring_redirect":
                stdin = self.text(redirect.named_children[-1])
        if body is None:
            return True
        return self.run(body, stdin) if body.type == "command" else self.run(body)

    def do_pipeline(self, node: Any) -> Status:
        return self.block(node.children)

    def do_list(self, node: Any) -> Status:
        left, operator, right = node.children[0], node.children[1].type, node.children[-1]
        status = self.run(left)
        if status is None:
            self.perhaps([[right]], node, _short(left))
            return None
        return self.run(right) if status == (operator == "&&") else status

    def do_negated_command(self, node: Any) -> Status:
        status = self.run(node.named_children[-1])
        return None if status is None else not status

    def do_if_statement(self, node: Any) -> Status:
        branches: list[tuple[list[Any], list[Any]]] = [([], [])]
        for child in node.children:
            if child.type in ("if", "then", "fi", ";", "comment"):
                continue
            if child.type == "elif_clause":
                at = next(i for i, c in enumerate(child.children) if c.type == "then")
                branches.append((list(child.children[1:at]), list(child.children[at + 1 :])))
            elif child.type == "else_clause":
                branches.append(([], list(child.children[1:])))
            elif child in node.children_by_field_name("condition"):
                branches[0][0].append(child)
            else:
                branches[0][1].append(child)
        for place, (condition, body) in enumerate(branches):
            status = self.block([c for c in condition if c.is_named]) if condition else True
            if status is None:
                rest = [body, *(b for _, b in branches[place + 1 :])]
                self.perhaps(rest, node, _short(node))
                return None
            if status:
                return self.block(body)
        return True

    def do_for_statement(self, node: Any) -> Status:
        name = _text(node.child_by_field_name("variable"))
        values = node.children_by_field_name("value")
        items = [word for value in values for word in self.words(value)] if values else list(self.arguments)
        body = node.child_by_field_name("body")
        if any(marks(item) for item in items):
            self.variables[name] = self.unknown(node.child_by_field_name("variable"), "", f"${name}")
            self.perhaps([[body]], node, _short(node))
            return None
        for item in items:
            self.assign(name, item)
            try:
                self.run(body)
            except _Stop as stop:
                if stop.kind == "break":
                    break
                if stop.kind != "continue":
                    raise
        return True

    def do_while_statement(self, node: Any) -> Status:
        self.perhaps([[node.child_by_field_name("body")]], node, _short(node))
        return None

    do_c_style_for_statement = do_while_statement

    def do_case_statement(self, node: Any) -> Status:
        subject = self.text(node.child_by_field_name("value"))
        items = [c for c in node.children if c.type == "case_item"]
        if marks(subject):
            self.perhaps([self.case_body(item) for item in items], node, _short(node))
            return None
        for item in items:
            patterns, start = [], item.children[0].start_byte
            for child in item.children:
                if child.type in ("|", ")"):
                    parts = [c for c in item.children if start <= c.start_byte and c.end_byte <= child.start_byte]
                    patterns.append("".join(self.pattern(part) for part in parts if part.is_named))
                    start = child.end_byte
                    if child.type == ")":
                        break
            if any(re.fullmatch(pattern, subject, re.DOTALL) for pattern in patterns):
                return self.block(self.case_body(item))
        return True

    def case_body(self, item: Any) -> list[Any]:
        at = next(i for i, c in enumerate(item.children) if c.type == ")")
        return [c for c in item.children[at + 1 :] if c.is_named]

    def do_function_definition(self, node: Any) -> Status:
        self.functions[_text(node.child_by_field_name("name"))] = node.child_by_field_name("body")
        return True

    def do_unset_command(self, node: Any) -> Status:
        for child in node.named_children:
            name = _text(child)
            self.variables.pop(name, None)
            self.given.pop(name, None)
            self.unset.add(name)
        return True

    def do_declaration_command(self, node: Any) -> Status:
        keyword = node.children[0].type
        options = [_text(c) for c in node.named_children if c.type == "word"]
        for child in node.named_children:
            name = None
            if child.type == "variable_assignment":
                name = self.do_variable_assignment(child) and _text(child.child_by_field_name("name"))
            elif child.type == "variable_name":
                name = _text(child)
            if name and (keyword == "export" or any(o.startswith("-") and "x" in o for o in options)):
                self.exported.add(name)
        return True

    def do_variable_assignments(self, node: Any) -> Status:
        return self.block(node.children)

    def do_variable_assignment(self, node: Any) -> Status:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        adding = any(c.type == "+=" for c in node.children)
        if target.type != "variable_name":
            name = re.match(r"\w*", _text(target))[0]
            self.note(node, "an element of an array is set by its index")
            self.doubtful[name] = _line(node)
            return True
        name = _text(target)
        if value is not None and value.type == "array":
            items = [word for child in value.named_children for word in self.words(child)]
            before = self.variables.get(name, []) if adding else []
            self.assign(name, [*([before] if isinstance(before, str) else before), *items])
            return True
        text = self.text(value, home=True) if value is not None else ""
        before = self.variables.get(name, "") if adding else ""
        self.assign(name, [*before, text] if isinstance(before, list) else before + text)
        return True

    def do_test_command(self, node: Any) -> Status:
        parts = [c for c in node.children if c.is_named]
        if node.children[0].type == "((":
            found = self.arithmetic(parts[0]) if parts else None
            return None if found is None else found != 0
        return self.test(parts[0]) if len(parts) == 1 else None

    def do_command(self, node: Any, stdin: str | None = None) -> Status:
        prefix: dict[str, str] = {}
        words: list[str] = []
        for child in node.children:
            if child.type == "variable_assignment":
                value = child.child_by_field_name("value")
                prefix[_text(child.child_by_field_name("name"))] = self.text(value, home=True) if value else ""
            elif child.type == "herestring_redirect":
                stdin = self.text(child.named_children[-1])
            elif child.type == "command_name":
                words += self.words(child.named_children[0] if child.named_children else child)
            elif child.is_named and not child.type.endswith("_redirect"):
                words += self.words(child)
        if not words:
            return True
        return self.command(node, words, prefix, stdin)

    def command(self, node: Any, words: list[str], prefix: Mapping[str, str], stdin: str | None) -> Status:
        while words and words[0] in ("exec", "nohup", "time", "env", "command", "builtin"):
            words = words[1:]
            while words and re.match(r"[A-Za-z_]\w*=", words[0]):
                name, _, text = words.pop(0).partition("=")
                prefix = {**prefix, name: text}
        if not words:
            return True
        name = words[0]
        found = launch_in(words)
        if found:
            exported = {n: v for n, v in self.variables.items() if n in self.exported and isinstance(v, str)}
            exported |= {n: self.given[n] for n in self.exported - exported.keys() if n in self.given}
            self.launches.append(Launch(_line(node), *found, {**exported, **prefix}, self.condition))
            return True
        if name in self.functions:
            return self.call(name, words[1:])
        if name in ("exit", "return", "break", "continue"):
            # In a block of which it is not known whether it runs, what stands behind an exit may run as well.
            if name == "exit" and self.condition:
                return None
            raise _Stop(name)
        if name == "shift":
            del self.arguments[: int(words[1]) if len(words) > 1 and words[1].isdigit() else 1]
        elif name == "set" and "--" in words:
            self.arguments[:] = words[words.index("--") + 1 :]
        elif name == "read":
            self.read_builtin(node, words[1:], prefix.get("IFS", " \t\n"), stdin)
        elif name == "false":
            return False
        elif (
            "-m" in words
            and words[words.index("-m") + 1 : words.index("-m") + 2]
            and words[words.index("-m") + 1].startswith("recipes.")
        ):
            self.prepare = words[words.index("-m") + 1 :]
        elif name in ("source", "."):
            self.note(node, "what that file sets is not known here")
        elif name not in HARMLESS:
            self.note(node, "only the launch itself is carried over")
        return True

    def call(self, name: str, arguments: list[str]) -> Status:
        self.called.add(name)
        outer, self.arguments = self.arguments, arguments
        try:
            return self.run(self.functions[name])
        except _Stop as stop:
            if stop.kind == "exit":
                raise
            return None
        finally:
            self.arguments = outer

    def read_builtin(self, node: Any, words: list[str], separators: str, stdin: str | None) -> None:
        names = [w for w in words if not w.startswith("-")]
        if stdin is None or any(re.match(r"-[^ra]", w) for w in words):
            self.note(node, "what it reads is not known here")
            for name in names:
                self.assign(name, self.unknown(node, name, f"${name}"))
            return
        # bash joins runs of blanks but not of other separators, and takes one at the end as a terminator
        blank = not separators.strip()
        parts = stdin.split() if blank else re.split("[" + re.escape(separators) + "]", stdin)
        if not blank and parts and parts[-1] == "":
            parts.pop()
        if any(w.startswith("-") and "a" in w for w in words):
            self.assign(names[0], parts)
            return
        for place, name in enumerate(names):
            last = place == len(names) - 1
            self.assign(name, " ".join(parts[place:]) if last else (parts[place] if place < len(parts) else ""))

    def perhaps(self, branches: Sequence[Sequence[Any]], node: Any, condition: str) -> None:
        """Look into blocks of which it is not known whether they run: launches count if there are no others."""
        for body in branches:
            inner = self.copy()
            inner.condition = condition
            with suppress(_Stop):
                inner.block([n for n in body if n.is_named])
            found = [*inner.launches, *inner.conditional]
            self.conditional += [replace(launch, condition=condition) for launch in found]
            if found:
                self.notes += inner.notes
                self.assumed |= inner.assumed
                self.prepare = inner.prepare
            changed = [n for n, v in inner.variables.items() if self.variables.get(n) != v]
            changed += [n for n in inner.exported if n not in self.exported]
            for name in changed:
                self.doubtful[name] = _line(node)
        names = ", ".join(sorted(n for n, line in self.doubtful.items() if line == _line(node)))
        self.note(node, f"whether this runs is not known here{f'; it sets {names}' if names else ''}")

    def copy(self) -> _Shell:
        """A shell whose variables may change without changing ours; what it notes, we note."""
        values = {n: list(v) if isinstance(v, list) else v for n, v in self.variables.items()}
        return replace(
            self,
            variables=values,
            arguments=list(self.arguments),
            exported=set(self.exported),
            unset=set(self.unset),
            functions=dict(self.functions),
            doubtful=dict(self.doubtful),
            launches=[],
            conditional=[],
            notes=[],
            assumed=dict(self.assumed),
            prepare=list(self.prepare),
        )

    # ---- values

    def assign(self, name: str, value: str | list[str]) -> None:
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > MAX_TEXT:
            raise RecipeError(f"The variable {name} of the script grows beyond {MAX_TEXT} characters.")
        self.variables[name] = value
        self.unset.discard(name)
        self.doubtful.pop(name, None)

    def lookup(self, name: str) -> str | list[str] | None:
        """Return a variable's value, or None when nothing here sets it."""
        if name in self.doubtful:
            self.doubts[name] = self.doubtful[name]
        if name in self.variables:
            return self.variables[name]
        return self.given.get(name)

    def unknown(self, node: Any, variable: str = "", source: str | None = None) -> str:
        made = Unknown(_text(node) if source is None else source, _line(node), variable)
        if made not in self.unknowns:
            self.unknowns.append(made)
        return f"__unknown_{self.unknowns.index(made)}__"

    def note(self, node: Any, reason: str) -> None:
        self.notes.append(Note(_line(node), _short(node), reason))

    def text(self, node: Any, *, home: bool = False) -> str:
        """Expand a word without splitting it, as in an assignment; `home`: a leading ~ is the home directory."""
        found = "".join(" ".join(v) if isinstance(v, list) else v for v, _ in self.parts(node, False))
        if home and node.type in ("word", "concatenation") and _text(node).startswith("~/"):
            found = self.unknown(node, "HOME", "$HOME") + found[1:]
        return found

    def words(self, node: Any) -> list[str]:
        """Expand a word to the words it becomes: unquoted expansions are split at blanks, "${a[@]}" at its items."""
        if node.type == "comment":
            return []
        words: list[str] = []
        current: str | None = None
        for value, quoted in self.parts(node, False):
            if isinstance(value, list):
                pieces = value if quoted else [p for item in value for p in item.split()]
                if pieces:
                    words += [(current or "") + pieces[0], *pieces[1:]]
                    current = words.pop()
            elif quoted:
                current = (current or "") + value
            else:
                pieces = value.split()
                if value[:1].isspace() and current is not None:
                    words.append(current)
                    current = None
                if pieces:
                    words += [(current or "") + pieces[0], *pieces[1:]]
                    current = words.pop()
                if value[-1:].isspace() and pieces:
                    words.append(current or "")
                    current = None
        return words if current is None else [*words, current]

    def parts(self, node: Any, quoted: bool) -> Iterator[tuple[str | list[str], bool]]:
        """Yield (text or items, whether it is exempt from splitting) of a word."""
        kind = node.type
        if kind == "concatenation":
            for child in node.children:
                yield from self.parts(child, quoted)
        elif kind == "string":
            inner = [c for c in node.children[1:-1] if c.is_named and c.type != "string_content"]
            found = list(self.region(inner, node.children[0].end_byte, node.children[-1].start_byte, True))
            # "" is a word, however empty; "${items[@]}" of no items is none
            items = any(isinstance(value, list) for value, _ in found)
            yield from [part for part in found if part[0] or not items]
        elif kind == "raw_string":
            yield _text(node)[1:-1], True
        elif kind == "ansi_c_string":
            yield _ansi_c(_text(node)[2:-1]), True
        elif kind in ("simple_expansion", "expansion"):
            yield self.expansion(node), quoted
        elif kind == "arithmetic_expansion":
            inner = node.named_children
            found = self.arithmetic(inner[0]) if len(inner) == 1 else None
            yield (self.unknown(node) if found is None else str(found)), True
        elif kind == "command_substitution":
            yield self.substitution(node), quoted
        elif kind == "translated_string":
            yield from self.parts(node.named_children[0], quoted)
        elif kind == "process_substitution":
            yield self.unknown(node), True
        else:
            yield _unescape(_text(node)), True

    def region(self, nodes: Sequence[Any], start: int, end: int, quoted: bool) -> Iterator[tuple[Any, bool]]:
        """Expand `nodes` and take what stands between them as written: the grammar gives blanks no node."""
        for node in nodes:
            yield self.literal(start, node.start_byte, quoted), quoted
            yield from self.parts(node, quoted)
            start = node.end_byte
        yield self.literal(start, end, quoted), quoted

    def literal(self, start: int, end: int, quoted: bool) -> str:
        text = self.source[start:end].decode("utf-8", "replace")
        return re.sub(r'\\([$`"\\\n])', lambda m: "" if m[1] == "\n" else m[1], text) if quoted else _unescape(text)

    def substitution(self, node: Any) -> str:
        """$(…) is unknown, but for three that only cut a text or name the directory."""
        inner = node.named_children
        if len(inner) == 1 and inner[0].type == "command":
            words = [
                w
                for c in inner[0].named_children
                for w in self.words(c.named_children[0] if c.type == "command_name" else c)
            ]
            if words == ["pwd"]:
                return self.unknown(node, "PWD", "$PWD")
            if len(words) == 2 and words[0] in ("basename", "dirname") and not words[1].startswith("-"):
                path = PurePosixPath(words[1])
                found = path.name if words[0] == "basename" else str(path.parent)
                if not marks(found) or words[0] == "dirname":
                    return found
        return self.unknown(node)

    def expansion(self, node: Any) -> str | list[str]:
        """Return the value of $name, ${name…}, "$@" or "${name[@]}"."""
        children = [c for c in node.children if c.type not in ("$", "${", "}")]
        if not children:
            return self.unknown(node)
        prefix = children[0].type if children[0].type in ("#", "!") else ""
        if prefix and len(children) == 1:
            return str(len(self.arguments)) if prefix == "#" else self.unknown(node)
        if prefix:
            children = children[1:]
        name, value = self.named(children[0], node)
        rest = children[1:]
        if prefix == "#":
            return str(len(value)) if value is not None and not marks("".join(value)) else self.unknown(node)
        if prefix == "!":
            if isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*", value) and not rest:
                found = self.lookup(value)
                return "" if found is None else found
            return self.unknown(node)
        if not rest:
            return self.plain(name, value, node)
        operator = rest[0].type if not rest[0].is_named else _text(rest[0])
        inner = [c for c in rest[1:] if c.is_named]
        end = node.end_byte - 1

        def word() -> str:
            found = self.region(inner, rest[0].end_byte, end, False)
            return "".join(" ".join(v) if isinstance(v, list) else v for v, _ in found)

        if operator in (":-", "-", ":=", "=", ":+", "+", ":?", "?"):
            return self.default(name, value, operator, word, node)
        value = self.plain(name, value, node)
        if operator in ("#", "##", "%", "%%", "/", "//", "/#", "/%", "^", "^^", ",", ",,"):

            def cut(text: str) -> str:
                return self.cut(text, operator, rest, end)

            return [cut(item) for item in value] if isinstance(value, list) else cut(value)
        if operator == ":":
            return self.slice(name, value, word(), node)
        return self.unknown(node)

    def named(self, node: Any, whole: Any) -> tuple[str, str | list[str] | None]:
        """Return the name in an expansion and its value: None unset, a list for all items."""
        text = _text(node)
        if node.type == "subscript":
            name, index = _text(node.child_by_field_name("name")), _text(node.child_by_field_name("index"))
            value = self.lookup(name)
            items = [value] if isinstance(value, str) else value
            if index in ("@", "*"):
                return name, items or []
            if items is not None and re.fullmatch(r"\d+", index):
                return name, items[int(index)] if int(index) < len(items) else None
            return text, self.unknown(whole) if items is not None else None
        if text in ("@", "*"):
            return text, list(self.arguments)
        if text == "#":
            return text, str(len(self.arguments))
        if text.isdigit():
            place = int(text)
            if place == 0:
                return text, self.unknown(whole)
            return text, self.arguments[place - 1] if place <= len(self.arguments) else None
        if node.type == "special_variable_name":
            return text, self.unknown(whole)
        value = self.lookup(text)
        if isinstance(value, list):  # $array is its first item
            value = value[0] if value else None
        if value is None and text not in self.unset:
            if text in PLACES or text in ALWAYS_SET:
                value = self.unknown(whole, text, f"${text}")
            elif text == "BASH_SOURCE":
                value = self.unknown(whole)
        return text, value

    def plain(self, name: str, value: str | list[str] | None, node: Any) -> str | list[str]:
        if value is not None:
            return value
        if name in self.unset or name.isdigit():
            return ""
        return self.unknown(node, name, f"${name}") if re.fullmatch(r"[A-Za-z_]\w*", name) else self.unknown(node)

    def default(self, name: str, value: Any, operator: str, word: Callable[[], str], node: Any) -> str | list[str]:
        present = value is not None and (value not in ("", []) or not operator.startswith(":"))
        kind = operator[-1]
        if kind == "+":
            return word() if present else ""
        if present:
            return value
        if kind == "?":
            return self.unknown(node, name, f"${name}")
        text = word()
        if value is None and re.fullmatch(r"[A-Za-z_]\w*", name) and name not in self.variables:
            self.assumed.setdefault(name, text)
        if kind == "=":
            self.assign(name, text)
        return text

    def cut(self, text: str, operator: str, rest: Sequence[Any], end: int) -> str:
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        if operator[0] in "#%":
            pattern = "".join(self.pattern(c) for c in rest[1:] if c.is_named)
            lengths = range(len(text) + 1)
            longest = len(operator) == 2
            for length in reversed(lengths) if longest else lengths:
                piece = text[:length] if operator[0] == "#" else text[len(text) - length :]
                if re.fullmatch(pattern, piece, re.DOTALL):
                    return text[length:] if operator[0] == "#" else text[: len(text) - length]
            return text
        # The grammar takes an escaped / for the one that ends the pattern, so that one is looked for here.
        start = rest[0].end_byte
        quoted = [c for c in rest[1:] if c.type in _QUOTED]
        middle = next((n for n in range(start, end) if self.ends_pattern(n, start, quoted)), end)
        pattern = ""
        for node in (c for c in quoted if c.end_byte <= middle):
            pattern += _glob(self.source[start : node.start_byte].decode("utf-8", "replace")) + self.pattern(node)
            start = node.end_byte
        pattern += _glob(self.source[start:middle].decode("utf-8", "replace"))
        parts = self.region([c for c in quoted if c.start_byte > middle], min(middle + 1, end), end, False)
        new = "".join(value for value, _ in parts if isinstance(value, str))
        if not pattern:
            return text
        anchored = {"/#": f"^(?:{pattern})", "/%": f"(?:{pattern})$"}.get(operator, pattern)
        return re.sub(anchored, lambda _: new, text, count=0 if operator == "//" else 1)

    def ends_pattern(self, place: int, start: int, quoted: Sequence[Any]) -> bool:
        """Whether the byte at `place` is a / that neither a backslash nor a quoted part of the pattern hides."""
        before = self.source[start:place]
        escaped = (len(before) - len(before.rstrip(b"\\"))) % 2
        inside = any(c.start_byte <= place < c.end_byte for c in quoted)
        return self.source[place : place + 1] == b"/" and not escaped and not inside

    def slice(self, name: str, value: str | list[str], bounds: str, node: Any) -> str | list[str]:
        numbers = [part.strip() for part in bounds.split(":")]
        if len(numbers) > 2 or not all(re.fullmatch(r"-?\d+", n) for n in numbers):
            return self.unknown(node)
        if isinstance(value, str) and marks(value):
            return self.unknown(node)
        start = int(numbers[0])
        if name in ("@", "*"):
            if start < 1:
                return self.unknown(node)
            start -= 1
        if len(numbers) == 1:
            return value[start:]
        length = int(numbers[1])
        return value[start:][:length]

    def pattern(self, node: Any) -> str:
        """Return a shell pattern as a regular expression; what is quoted in it stands for itself."""
        if node.type in _QUOTED:
            return re.escape(self.text(node))
        if node.type == "concatenation":
            return "".join(self.pattern(child) for child in node.children)
        return _glob(_text(node))

    # ---- tests and arithmetic

    def test(self, node: Any) -> Status:
        kind = node.type
        if kind in ("parenthesized_expression", "test_command"):
            return self.test(node.named_children[0])
        if kind == "unary_expression":
            operator, operand = node.children[0], node.children[-1]
            if _text(operator) == "!":
                found = self.test(operand)
                return None if found is None else not found
            name = _text(operator)
            if name == "-v" and operand.type == "word":
                found = self.lookup(_text(operand))
                return True if found is not None else None
            if name not in ("-z", "-n"):
                return None  # files, terminals: the machine's, not the text's
            # An unset variable is unknown as a value, but for whether it is there we take it as unset, as ${x:-} does.
            text = self.text(operand)
            if marks(text):
                lone = _MARK.fullmatch(text)
                variable = self.unknowns[int(lone[1])].variable if lone else ""
                if not variable or variable in ALWAYS_SET or variable in PLACES:
                    return None
                self.assumed.setdefault(variable, "")
                text = ""
            return (text == "") == (name == "-z")
        if kind == "binary_expression":
            return self.test_binary(node)
        text = self.text(node)
        return None if marks(text) else text != ""

    def test_binary(self, node: Any) -> Status:
        left, operator, right = node.children[0], _text(node.children[1]), node.children[-1]
        if operator in ("&&", "||", "-a", "-o"):
            one, two = self.test(left), self.test(right)
            if operator in ("&&", "-a"):
                return False if False in (one, two) else None if None in (one, two) else True
            return True if True in (one, two) else None if None in (one, two) else False
        first = self.text(left)
        if operator in ("=", "==", "!=", "=~"):
            pattern = None if operator == "=~" else self.pattern(right)
            if marks(first) or pattern is None or marks(pattern):
                return None
            return bool(re.fullmatch(pattern, first, re.DOTALL)) == (operator != "!=")
        second = self.text(right)
        compare = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}.get(operator)
        if compare is None or not all(re.fullmatch(r"-?\d+", t) for t in (first, second)):
            return None
        return bool(_ARITHMETIC[compare](int(first), int(second)))

    def arithmetic(self, node: Any) -> int | None:
        """Evaluate an arithmetic expression as bash does (integers, division towards zero), or None."""
        kind = node.type
        if kind == "parenthesized_expression":
            inner = node.named_children
            return self.arithmetic(inner[0]) if len(inner) == 1 else None
        if kind == "binary_expression":
            operator = node.children[1].type
            one, two = self.arithmetic(node.children[0]), self.arithmetic(node.children[-1])
            if one is None or two is None or operator not in _ARITHMETIC:
                return None
            if (operator in ("/", "%") and two == 0) or (operator in ("**", "<<", ">>") and not 0 <= two <= 64):
                return None
            return int(_ARITHMETIC[operator](one, two))
        if kind == "unary_expression":
            inner = self.arithmetic(node.children[-1])
            if inner is None or node.children[0].type not in ("-", "+", "!", "~"):
                return None
            return {"-": -inner, "+": inner, "!": int(not inner), "~": ~inner}[node.children[0].type]
        if kind == "ternary_expression":
            parts = [self.arithmetic(c) for c in node.named_children]
            return None if None in parts or len(parts) != 3 else parts[1] if parts[0] else parts[2]
        if kind == "variable_name" or (kind == "word" and re.fullmatch(r"[A-Za-z_]\w*", _text(node))):
            found = self.lookup(_text(node))
            text = found if isinstance(found, str) else None
        else:
            text = self.text(node)
        return _integer(text)


# ------------------------------------------------------------------------------------------------------------- texts

_ARITHMETIC: Mapping[str, Callable[[int, int], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "**": lambda a, b: a**b,
    "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
}


def _parse(source: bytes) -> tuple[bytes, Any]:
    """Return the syntax tree, and the source it is of.

    tree-sitter-bash 0.25 ends a word at the second of two variables in it (`$a/b/$c/d`), without an error. What it
    leaves is a lone `$` before a name; written as `${c}` it is read right.
    """
    import tree_sitter
    import tree_sitter_bash

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    while True:
        tree = parser.parse(source)
        ends = {
            node.end_byte for node in _leaves(tree.root_node) if node.type == "$" and node.parent.type not in _SIGNED
        }
        names = {end: found for end in ends if (found := re.compile(rb"[A-Za-z_]\w*").match(source, end))}
        if not names:
            return source, tree
        for end in sorted(names, reverse=True):
            source = source[:end] + b"{" + names[end][0] + b"}" + source[names[end].end() :]


# Parts of a pattern that stand for their text, whatever signs it holds.
_QUOTED = ("string", "raw_string", "ansi_c_string", "simple_expansion", "expansion", "command_substitution")

# What a `$` begins. As a child of anything else it stands alone.
_SIGNED = ("simple_expansion", "translated_string")


def _leaves(root: Any) -> Iterator[Any]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.child_count:
            waiting += node.children
        else:
            yield node


def _integer(text: str | None) -> int | None:
    """Read a number as bash's arithmetic does: 0x10 and 010 are 16 and 8."""
    if text is None or not (found := re.fullmatch(r"\s*(-?)(0[xX][0-9a-fA-F]+|\d{1,18})\s*", text)):
        return None
    sign, digits = found.groups()
    octal = len(digits) > 1 and digits[0] == "0" and digits[1] not in "xX"
    if octal and re.search("[89]", digits):
        return None
    return int(sign + digits, 8 if octal else 0)


def _text(node: Any) -> str:
    return node.text.decode("utf-8", "replace")


def _line(node: Any) -> int:
    return node.start_point[0] + 1


def _short(node: Any) -> str:
    """The first line of a node, short enough for a report."""
    first = _text(node).strip().splitlines()[0] if _text(node).strip() else ""
    return first if len(first) <= 80 else first[:77] + "..."


def _errors(node: Any) -> Iterator[Any]:
    if node.type == "ERROR" or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from _errors(child)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: "" if m[1] == "\n" else m[1], text, flags=re.DOTALL)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v", "\\": "\\"}


def _ansi_c(text: str) -> str:
    def one(found: re.Match[str]) -> str:
        escape = found[1]
        if escape[0] == "x" and len(escape) > 1:
            return chr(int(escape[1:], 16))
        return _ESCAPES.get(escape, escape)

    return re.sub(r"\\(x[0-9a-fA-F]{1,2}|.)", one, text, flags=re.DOTALL)


def _glob(pattern: str) -> str:
    """Translate *, ?, [set] and [[:class:]] of an unquoted shell pattern to a regular expression."""
    classes = {"space": r"\s", "digit": r"\d", "alnum": "A-Za-z0-9", "alpha": "A-Za-z", "upper": "A-Z", "lower": "a-z"}
    classes |= {"punct": r"!-/:-@\[-`{-~", "blank": r" \t"}
    made, place = "", 0
    while place < len(pattern):
        here = pattern[place]
        found = re.compile(r"\[([!^]?)((?:\[:\w+:\]|[^\]])(?:\[:\w+:\]|[^\]])*)\]").match(pattern, place)
        if here == "\\" and place + 1 < len(pattern):
            made, place = made + re.escape(pattern[place + 1]), place + 2
        elif here in "*?":
            made, place = made + (".*" if here == "*" else "."), place + 1
        elif here == "[" and found:
            inner = re.sub(r"\[:(\w+):\]", lambda m: classes.get(m[1], ""), re.sub(r"\\(?!\w)", r"\\\\", found[2]))
            made, place = f"{made}[{'^' if found[1] else ''}{inner}]", found.end()
        else:
            made, place = made + re.escape(here), place + 1
    return made
