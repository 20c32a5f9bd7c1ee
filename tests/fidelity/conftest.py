"""One cache for all tests here: the wheel of a stack's verl is fetched once, and its absence is told, not hidden."""

from __future__ import annotations

import pytest

from recipes import verl_schema
from recipes.errors import RecipeError


@pytest.fixture(autouse=True)
def _kept_wheels(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("RECIPES_CACHE", str(tmp_path_factory.getbasetemp() / "wheels"))


@pytest.fixture(scope="session")
def verl():
    """Give the schema of a verl release; skip, with the reason, where its wheel cannot be had."""

    def have(version: str) -> verl_schema.Schema:
        try:
            return verl_schema.find(version)
        except RecipeError as fault:
            pytest.skip(str(fault))

    return have
