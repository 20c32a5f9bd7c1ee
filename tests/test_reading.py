"""The page on reading curves says what the verdict does. RECIPES_WRITE_TABLES=1 writes its tables."""

from __future__ import annotations

import os
import re
import string
from pathlib import Path

import pytest

from recipes import curves, schema, verdict
from recipes.cli import main
from recipes.verdict import reading

BOOK = Path(__file__).resolve().parent.parent / "notebooks" / "book" / "reading_the_curves.md"


@pytest.mark.parametrize(("name", "lines"), [("readings", reading.table), ("rules", reading.rules)])
def test_the_tables_of_the_page_are_those_of_the_verdict(name, lines):
    text, table = BOOK.read_text(), "\n".join(lines())
    between = re.compile(rf"(<!-- {name}: written by tests/test_reading.py -->\n\n)(?:\|.*\n)*(\n?<!-- end -->)")
    assert len(between.findall(text)) == 1
    new = between.sub(lambda found: f"{found[1]}{table}\n\n<!-- end -->", text)
    if os.environ.get("RECIPES_WRITE_TABLES"):
        BOOK.write_text(new)
    assert BOOK.read_text() == new


def test_every_rule_that_looks_at_a_curve_is_explained():
    whole = {"ENDED", "HANG", "INCOMPLETE", "TOO FEW", "EXPORT"}
    assert {rule for one in reading.READINGS for rule in one.rules} == set(verdict.RULES) - whole


def test_every_threshold_is_on_the_page_or_only_tells_noise_from_a_signal():
    named = {
        field
        for one in reading.READINGS
        for text in (one.good, one.worry)
        for _, field, _, _ in string.Formatter().parse(text)
        if field
    }
    assert set(vars(verdict.Thresholds())) - named == {
        "minimum_steps",
        "jump_floor",
        "kl_loss_floor",
        "grad_floor",
        "entropy_first",
        "plateau_steps",
    }


def test_what_the_page_tells_to_do_exists():
    """Keys of a recipe in the column `do` are keys of the schema, and commands are commands."""
    for one in reading.READINGS:
        for words in re.findall(r"`([^`]+)`", one.do):
            key = words.partition("=")[0]
            if key.startswith("recipes "):
                found = main
                for word in key.split()[1:]:
                    found = found.commands[word]
                continue
            kind = schema.Recipe
            for part in key.split("."):
                field = kind.__dataclass_fields__[part]
                kind = getattr(schema, str(field.type), str)


def test_the_picture_and_the_verdict_draw_the_same_lines():
    limits = verdict.Thresholds()
    lines = (limits.probability_difference_warn, limits.probability_difference_fail)
    assert lines == (curves.DIFF_NORMAL, curves.DIFF_PROBLEM)
