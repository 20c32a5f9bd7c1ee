"""The table of a stack: read as written, shared between variants, and refused when it could not be installed."""

from __future__ import annotations

import re
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from recipes import params, stack
from recipes.errors import RecipeError
from recipes.stack import conflict, refs

ASCEND = [name for name in stack.names() if name.startswith("ascend")]


def test_the_stacks_are_three_for_npus_and_one_without():
    assert stack.names() == ["ascend-9.0.0", "ascend-9.0.0-verl-0.9.0", "ascend-9.1.0", "cpu"]
    assert {name: stack.verl_version(name) for name in stack.names()} == {
        "ascend-9.0.0": "0.8.0",
        "ascend-9.0.0-verl-0.9.0": "0.9.0",
        "ascend-9.1.0": "0.9.1",
        "cpu": "0.9.1",
    }


# The refs published with the GLM-5.2 recipe after September 2026.
PUBLISHED = {
    "vllm": ("v0.23.0", "tag", "0fc695fc6d1d82e9a5ac6835ac8e4e1c83703665"),
    "vllm-ascend": ("releases/v0.23.0", "branch", "dc55ef82f8236585c8f2ee237f5b43507cae8686"),
    "Megatron-LM": ("core_v0.18.0", "tag", "ba7b5ebce12af60627a80985792a1449ce45f46c"),
    "MindSpeed": ("core_r0.18.0", "branch", "1881e01a996074b30d424349237d55a2c608e6b7"),
    "MegatronAdaptor": ("core_r0.18.0", "branch", "eb0e5043438dd753099432bc3b3d8e5916ed1844"),
    "TransformerEngineNPU": ("main", "branch", "e40ec34036eb7e04ad11b983f8c6b0dc9fcd88f9"),
    "MindSpeed-Ops": ("master", "branch", "dbee3f41b156bb051fc046facf69548400be2be1"),
    "MindSpeed-Bridge": ("master", "branch", "d82eec3ce2b31deb82cc5474b6813498efded908"),
    "Megatron-Bridge": ("v0.5.0", "tag", "fcbb6031103d0ca845c1a54d4fee55ecfcca17b6"),
}


def test_the_stack_of_glm_5_2_has_the_published_refs():
    held = stack.load("ascend-9.1.0").repositories
    assert {name: (held[name].ref, held[name].kind, held[name].commit) for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", ASCEND)
def test_mindspeed_keeps_its_history_and_everything_says_why(name):
    held = stack.load(name)
    assert held.repositories["MindSpeed"].depth == "full"
    assert [r.name for r in held.repositories.values() if len(r.why) < 20] == []
    assert set(held.hardware) == {"atlas_a2", "atlas_a3"}


def test_transformers_is_pinned_after_the_bridges_and_before_verl():
    order = stack.load("ascend-9.1.0").order
    published = ["vllm", "vllm-ascend", "Megatron-LM", "MegatronAdaptor", "TransformerEngineNPU", "MindSpeed"]
    published += ["MindSpeed-Ops", "MindSpeed-Bridge", "Megatron-Bridge", "transformers", "verl"]
    assert [name for name in order if name in published] == published
    assert order.index("torch") < order.index("torch_npu") < order.index("vllm")


@pytest.mark.parametrize(("name", "device", "image"), [
    ("ascend-9.0.0", "910b", "ascendhub/cann:9.0.0-910b-ubuntu22.04-py3.11"),
    ("ascend-9.1.0", "a3", "ascendhub/cann:9.1.0-a3-ubuntu22.04-py3.12"),
])  # fmt: skip
def test_the_base_image_is_named_without_a_registry_host(name, device, image):
    assert stack.load(name).base_image(device) == image
    assert "." not in image.split("/")[0]


def test_a_variant_says_only_what_differs():
    base, variant = stack.load("ascend-9.0.0"), stack.load("ascend-9.0.0-verl-0.9.0")
    differing = [name for name in base.repositories if base.repositories[name] != variant.repositories[name]]
    assert differing == ["verl"]
    assert base.packages == variant.packages
    assert base.order == variant.order
    assert variant.repositories["verl"].why == base.repositories["verl"].why


# No version of transformers satisfies verl 0.9.1, Megatron-Bridge 0.5.0, vllm-ascend 0.23.0 and the guide at once.
def test_the_four_wishes_for_transformers_exclude_each_other_and_the_table_says_who_is_overridden():
    held = next(entry for entry in stack.load("ascend-9.1.0").conflicts if entry.package == "transformers")
    assert not conflict.possible([*held.wants.values(), held.settled])
    assert held.settled == stack.load("ascend-9.1.0").packages["transformers"] == "5.10.4"
    assert held.overridden() == ["Megatron-Bridge 0.5.0", "vllm-ascend 0.23.0"]


def test_what_the_table_says_of_verl_is_what_its_own_metadata_says():
    asked = {r.name: str(r.specifier) for r in map(Requirement, requires("verl")) if not r.marker}
    for entry in stack.load("ascend-9.1.0").conflicts:
        told = conflict.specifier(entry.wants["verl 0.9.1"])
        assert told == conflict.specifier(asked[entry.package])


@pytest.mark.parametrize(("specifiers", "possible"), [
    (["==5.5.4", ">=5.8.1,<5.9.0"], False),
    ([">=5.5.3,<5.11,!=5.6.0", ">=5.8.1,<5.9.0"], True),
    ([">=5.5.3,<5.11,!=5.6.0", ">=5.8.1,<5.9.0", "5.10.4"], False),
    (["<2.0.0", ">=2.0.0"], False),
    (["<2.0.0", "<=1.26.0"], True),
    ([">5.0,<5.0.2"], True),
    (["!=5.6.0"], True),
    (["==2.10.*", "2.10.0.post4"], True),
    (["2.10.0+cpu", "==2.10.0"], True),
])  # fmt: skip
def test_specifiers_that_exclude_each_other_are_found(specifiers, possible):
    assert conflict.possible(specifiers) is possible


ENTRY = """
title: t
python: "3.12"
verl: 0.9.1
packages: {torch: 2.10.0, torch_npu: 2.10.0.post4}
order: [torch, torch_npu, Megatron-LM]
repositories:
  Megatron-LM:
    url: https://github.com/NVIDIA/Megatron-LM.git
    ref: core_v0.18.0
    kind: tag
    commit: ba7b5ebce12af60627a80985792a1449ce45f46c
    branches: core_r*
    tags: core_v*
    distribution: megatron-core
    after: [torch]
    why: the tag, since the branch moves
"""


@pytest.fixture
def entry(params_folder):
    def load(*changes: tuple[str, str]) -> stack.Stack:
        text = ENTRY
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (params_folder / "stacks" / "mine.yaml").write_text(text)
        return stack.load("mine")

    return load


def test_a_commit_of_digits_alone_stays_as_it_was_written(entry):
    digits = "0012345678901234567890123456789012345e67"
    assert entry(("ba7b5ebce12af60627a80985792a1449ce45f46c", digits)).repositories["Megatron-LM"].commit == digits


@pytest.mark.parametrize(("old", "new", "words"), [
    ("ref: core_v0.18.0", "ref: core_r0.18.0", "called a tag but named like a branch"),
    ("ref: core_v0.18.0", "ref: 'core_v0.18.0; rm -rf ~'", "no name of a git ref"),
    ("ref: core_v0.18.0", "ref: $(reboot)", "no name of a git ref"),
    ("kind: tag", "kind: tags", "one of tag, branch, commit"),
    ("commit: ba7b5ebce12af60627a80985792a1449ce45f46c", "commit: ba7b5eb", "40 hexadecimal digits"),
    ("    commit: ba7b5ebce12af60627a80985792a1449ce45f46c\n", "", "no commit"),
    ("    why: the tag, since the branch moves\n", "", "no why"),
    ("https://github.com/NVIDIA/", "git@github.com:NVIDIA/", "must be https"),
    ("order: [torch, torch_npu, Megatron-LM]", "order: [Megatron-LM, torch]", "must come after torch"),
    ("order: [torch, torch_npu, Megatron-LM]", "order: [torch, torch_npu]", "leaves out Megatron-LM"),
    ("order: [torch, torch_npu, Megatron-LM]", "order: [torch, Megatron-LM, vllm]", "does not have"),
    ("torch: 2.10.0,", "torch: 2.9.0,", "same major.minor"),
    ("torch: 2.10.0,", "torch: newest,", "PEP 440"),
    ("branches: core_r*", "branch: core_r*", "did you mean branches"),
    ("title: t", "titel: t", "did you mean title"),
    ("title: t", "conflicts: [{package: torch, settled: 2.10.0, how: h, wants: [{by: a, says: '>=2'}]}]\ntitle: t",
     "one version satisfies all"),
])  # fmt: skip
def test_a_table_that_cannot_be_installed_is_refused_with_the_reason(entry, old, new, words):
    with pytest.raises(RecipeError, match=re.escape(words)):
        entry((old, new))


def test_megatron_0_16_with_a_verl_that_does_not_hide_mtp_is_flagged(entry):
    assert [stack.warnings(stack.load(name)) for name in stack.names()] == [[]] * 4
    old = entry(("verl: 0.9.1", "verl: 0.7.1"), ("    why: the", "    version: 0.18.0\n    why: the"))
    (sentence,) = stack.warnings(old)
    assert "take verl >= 0.8.0" in sentence


def test_an_unknown_stack_is_refused_with_the_nearest_name():
    with pytest.raises(RecipeError, match=r"did you mean ascend-9.1.0"):
        stack.load("ascend-9.1")
    with pytest.raises(RecipeError, match="no stack"):
        stack.load("../stacks/cpu")


def test_stacks_that_name_each_other_are_refused(params_folder):
    (params_folder / "stacks" / "mine.yaml").write_text("defaults: [mine]\n")
    with pytest.raises(RecipeError, match="circle"):
        stack.load("mine")


@pytest.mark.parametrize(
    "ref", ["main", "core_v0.18.0", "releases/v0.23.0", "v0.18.0rc1", "26.0.0_core_r0.12.1", "a+b"]
)
def test_names_that_git_and_every_shell_take_are_refs(ref):
    assert refs.fault(ref) == ""


@pytest.mark.parametrize(("ref", "words"), [
    ("", "empty"), ("-rf", "starts with -"), ("a b", "' '"), ("a;b", "';'"), ("a`b", "'`'"), ("$HOME", "'$'"),
    ("a..b", "'..'"), ("a//b", "'//'"), ("a/.b", "'/.'"), ("a.lock", "'.lock'"), ("a/", "'/'"), ("a.", "'.'"),
    ("a@{1}", "'@'"), ("a\nb", "'\\n'"), ("a~1", "'~'"), ("a^{}", "'^'"), ("a:b", "':'"), ("a*", "'*'"), (".a", "'.'"),
    ("a'b", '"\'"'), ("a|b", "'|'"), ("a\\b", "'\\\\'"),
])  # fmt: skip
def test_names_with_shell_characters_or_against_git_s_own_rules_are_no_refs(ref, words):
    assert words in refs.fault(ref)


@pytest.mark.parametrize(("ref", "kind"), [
    ("core_r0.18.0", "branch"), ("core_v0.18.0", "tag"), ("main", "branch"), ("ba7b5ebce12a", "commit"), ("x", ""),
])  # fmt: skip
def test_a_repository_s_own_naming_tells_branches_from_tags(ref, kind):
    assert refs.kind_of(ref, branches="core_r*", tags="core_v*") == kind


def test_the_hardware_of_each_stack_is_known():
    for name in ASCEND:
        assert all(params.hardware_facts(kind).image for kind in stack.load(name).hardware)
