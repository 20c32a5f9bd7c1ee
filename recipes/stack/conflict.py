"""Requirements that exclude each other: is there any version that satisfies several specifiers at once?"""

from __future__ import annotations

from collections.abc import Iterable

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from recipes.errors import RecipeError


def specifier(text: str, where: str = "") -> SpecifierSet:
    """Return a version (`5.10.4`, meaning ==) or specifier (`>=2,<3`) as a SpecifierSet that admits pre-releases.

    Raises RecipeError naming `where` when it is neither (PEP 440).
    """
    text = text.strip()
    try:
        if text and text[0] not in "<>=!~":
            text = f"=={Version(text)}"
        return SpecifierSet(text, prereleases=True)
    except (InvalidVersion, InvalidSpecifier) as fault:
        where = where or "specifier"
        raise RecipeError(f"{where}: {text!r} is neither a version nor a specifier (PEP 440).") from fault


def admits(wanted: str, version: str) -> bool:
    """Say whether `version` satisfies `wanted`. A local label (2.10.0+cpu) counts as its public version (PEP 440)."""
    try:
        return specifier(wanted).contains(Version(version))
    except InvalidVersion:
        return False


def possible(specifiers: Iterable[str]) -> bool:
    """Say whether some version satisfies all of them.

    Between two neighbouring bounds nothing changes, so it is enough to try every bound, the next release after it and
    a post-release of it, and a version below and above all.
    """
    sets = [specifier(text) for text in specifiers]
    bounds = [Version(single.version.removesuffix(".*")) for one in sets for single in one]
    tried = {Version("0"), Version("9999")}
    for bound in bounds:
        release = [*bound.release, 0, 0][: max(3, len(bound.release))]
        following = [*release[:-1], release[-1] + 1]
        tried |= {bound, Version(".".join(map(str, following))), Version(f"{bound.base_version}.post999")}
        if release[-1] > 0:  # strictly below an exclusive upper bound such as <5.9.1
            tried.add(Version(".".join(map(str, [*release[:-1], release[-1] - 1]))))
        tried.add(Version(f"{bound.base_version}.dev0"))
    return any(all(version in one for one in sets) for version in tried)
