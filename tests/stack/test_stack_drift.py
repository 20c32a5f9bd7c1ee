"""Refs that drifted, as they were seen in the wild: each is found, at its line, with its own verdict."""

from __future__ import annotations

import textwrap
import time

import pytest

from recipes import stack
from recipes.errors import RecipeError
from recipes.stack import drift, mentions, shell_mentions

STACK = "ascend-9.1.0"


@pytest.fixture
def checkout(tmp_path):
    def write(**files: str):
        for path, text in files.items():
            place = tmp_path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(textwrap.dedent(text).lstrip("\n"))
        return tmp_path

    return write


def found(root, name=STACK, **options):
    return drift.look(stack.load(name), root, **options).drifts


def told(root, *subjects, **options):
    """(where, subject, found, verdict) of every difference, or of those about `subjects`."""
    return [
        (f"{d.file}:{d.line}", d.subject, d.found, d.verdict)
        for d in found(root, **options)
        if not subjects or d.subject in subjects
    ]


DOCKERFILE = """
    FROM ascendhub/cann:9.1.0-{device}-ubuntu22.04-py3.12
    ARG SOC_VERSION="{soc}"
    # Clone what is built
    RUN ARCH=$(uname -m) && \\
        git clone --depth 1 --branch v0.23.0 https://github.com/vllm-project/vllm.git && \\
        # this one keeps its history
        git clone https://gitcode.com/Ascend/MindSpeed.git && \\
        cd MindSpeed && git checkout 1881e01a996074b30d424349237d55a2c608e6b7 && cd .. && \\
        git clone --depth 1 --branch core_v0.18.0 https://github.com/NVIDIA/Megatron-LM.git
"""
A2 = DOCKERFILE.format(device="910b", soc="ascend910b1")
A3 = DOCKERFILE.format(device="a3", soc="ascend910_9392")


def test_a_checkout_that_says_what_the_table_says_has_no_drift(checkout):
    root = checkout(**{"docker/Dockerfile.ascend_9.1.0_a2": A2, "docker/Dockerfile.ascend_9.1.0_a3": A3})
    assert told(root) == []


@pytest.mark.parametrize("words", ["verl 0.1 to 0.9", "verl 0.1–0.9", "verl 0.1 到 0.9", "verl v0.1.0 - v0.9.0"])
def test_a_range_of_versions_is_no_pin(checkout, words):
    assert told(checkout(**{"README.md": f"On CANN 9.1.0 logs of {words} are read.\n"})) == []
    (alone,) = found(checkout(**{"README.md": "On CANN 9.1.0 logs of verl 0.1 are read.\n"}))
    assert (alone.found, alone.wanted[:6]) == ("0.1", "v0.9.1")


# 1. An install script still clones the branch while both Dockerfiles clone the tag.
def test_a_branch_where_a_tag_was_meant(checkout):
    root = checkout(**{
        "docker/Dockerfile.ascend_9.1.0_a2": A2,
        "docker/Dockerfile.ascend_9.1.0_a3": A3,
        "scripts/install_npu.sh": """
            set -e
            git clone --depth 1 --branch core_r0.18.0 https://github.com/NVIDIA/Megatron-LM.git
        """,
    })  # fmt: skip
    (one,) = found(root)
    assert (one.file, one.line, one.verdict) == ("scripts/install_npu.sh", 2, "branch_for_tag")
    assert (one.found, one.wanted) == ("core_r0.18.0", "core_v0.18.0 at ba7b5ebce12a")
    assert "docker/Dockerfile.ascend_9.1.0_a2:9 says core_v0.18.0" in one.why


# 2. Script and documents stay at 0.16 while the Dockerfile moved to 0.18.
def test_a_script_and_a_table_that_stayed_behind(checkout):
    root = checkout(**{
        "docker/Dockerfile.ascend_9.1.0_a3": A3,
        "scripts/install_npu.sh": """
            git clone https://gitcode.com/Ascend/MindSpeed.git
            cd MindSpeed && git checkout core_r0.16.0 && cd ..
        """,
        "docs/install.rst": """
            ============= ================ ===========
            Dependency    Version          For NPUs
            ============= ================ ===========
            CANN          ``9.1.0``        toolkit
            Megatron-LM   ``core_r0.16.0`` training
            MindSpeed     ``core_r0.16.0`` adaptation
            ============= ================ ===========
        """,
    })  # fmt: skip
    assert told(root) == [
        ("docs/install.rst:5", "Megatron-LM", "core_r0.16.0", "other_ref"),
        ("docs/install.rst:6", "MindSpeed", "core_r0.16.0", "other_ref"),
        ("scripts/install_npu.sh:2", "MindSpeed", "core_r0.16.0", "other_ref"),
    ]


# 3. One guide names .post2 in its changelog and .post4 in its table. Older entries of the changelog are history.
def test_a_guide_that_differs_from_itself(checkout):
    root = checkout(**{
        "docs/guide.rst": """
            Install on CANN
            ===============

            -  2026/08/03: vLLM went to ``0.23.0``, torch ``2.10.0``\\ ,
               torch_npu ``2.10.0.post2``\\ .
            -  2026/05/13: torch ``2.9.0``\\ , torch_npu ``2.9.0.post2``\\ .

            ============= ====================
            torch         ``2.10.0``
            torch_npu     ``2.10.0.post4``
            ============= ====================
        """,
    })  # fmt: skip
    (one,) = found(root)
    assert (one.line, one.found, one.wanted, one.verdict) == (5, "2.10.0.post2", "2.10.0.post4", "other_version")
    assert "docs/guide.rst:10 says 2.10.0.post4" in one.why


# 4. A page of tags: CANN beside a file of another one, a file that is not there, A2 and A3 swapped.
def test_a_page_of_tags_with_three_faults(checkout):
    root = checkout(**{
        "docker/Dockerfile.ascend_9.1.0_a2": A2,
        "docker/Dockerfile.ascend_9.1.0_a3": A3,
        "docker/tags.md": """
            | Device | CANN Base Image | Backend | Dockerfile |
            |--------|-----------------|---------|------------|
            | 910b | 9.0.0 | vLLM | [Dockerfile.ascend_9.1.0_a2](https://h/blob/main/Dockerfile.ascend_9.1.0_a2) |
            | A3 | 9.1.0 | vLLM | [Dockerfile.ascend_9.1.1_a3](https://h/blob/main/Dockerfile.ascend_9.1.1_a3) |
            | 910b | 9.1.0 | vLLM | [Dockerfile.ascend_9.1.0_a3](https://h/blob/main/Dockerfile.ascend_9.1.0_a3) |
            | A3 | 9.1.0 | vLLM | [Dockerfile.ascend_9.1.0_a2](https://h/blob/main/Dockerfile.ascend_9.1.0_a2) |
            | A3 | 8.3.RC1 | vLLM | [Dockerfile.ascend_8.3.rc1_a3](https://h/blob/v0.7/Dockerfile.ascend_8.3.rc1_a3) |
        """,
    })  # fmt: skip
    assert told(root) == [
        ("docker/tags.md:3", "CANN", "9.0.0", "other_cann"),
        ("docker/tags.md:4", "CANN", "9.1.0", "other_cann"),
        ("docker/tags.md:4", "Dockerfile", "Dockerfile.ascend_9.1.1_a3", "no_file"),
        ("docker/tags.md:5", "device", "910b", "other_device"),
        ("docker/tags.md:6", "device", "A3", "other_device"),
    ]


def test_a_dockerfile_whose_name_image_and_soc_are_of_different_devices(checkout):
    root = checkout(**{"Dockerfile.ascend_9.1.0_a2": DOCKERFILE.format(device="a3", soc="ascend910_9392")})
    assert told(root, "device") == [
        ("Dockerfile.ascend_9.1.0_a2:1", "device", "a3", "other_device"),
        ("Dockerfile.ascend_9.1.0_a2:2", "device", "ascend910_9392", "other_device"),
    ]


# 5. transformers: four that no version satisfies. The table knows it, so its own parties only get a warning.
def test_the_conflict_the_table_settles_is_a_warning_and_another_pin_is_an_error(checkout):
    root = checkout(**{
        "verl/setup.py": """
            install_requires = [
                "numpy>=2.0.0",
                "transformers>=5.5.3,!=5.6.0,<5.11",
            ]
        """,
        "bridge/pyproject.toml": """
            [project]
            name = "megatron-bridge"
            dependencies = [
                "transformers>=5.8.1,<5.9.0",
            ]
        """,
        "vllm-ascend/requirements.txt": "torch==2.10.0\ntransformers==5.5.4  # as vLLM has it\n",
        "docs/install.md": "On CANN 9.1.0, `pip install` these:\n\n    pip install 'transformers==5.10.4'\n",
        "scripts/install_npu.sh": "pip install transformers==5.3.0\n",
    })  # fmt: skip
    assert told(root) == [
        ("bridge/pyproject.toml:4", "transformers", "<5.9.0,>=5.8.1", "settled"),
        ("scripts/install_npu.sh:1", "transformers", "==5.3.0", "excludes"),
        ("vllm-ascend/requirements.txt:2", "transformers", "==5.5.4", "settled"),
    ]
    assert drift.look(stack.load(STACK), root).errors == 1


# 6. numpy: a list for NPUs says below 2, verl says from 2 on.
def test_a_list_for_npus_that_leaves_out_the_settled_numpy(checkout):
    root = checkout(**{"requirements-npu.txt": "accelerate\nnumpy<2.0.0\n", "requirements-cuda.txt": "numpy<2.0.0\n"})
    (one,) = found(root)
    assert (one.file, one.line, one.found, one.wanted) == ("requirements-npu.txt", 2, "<2.0.0", ">=2.0.0")
    assert (one.verdict, one.severity) == ("settled", "warning")
    # The generation before agrees with it.
    assert found(root, "ascend-9.0.0") == ()


# 7. A recipe names the branch of vllm in its head where the Dockerfile uses the tag.
def test_a_recipe_that_names_a_branch_in_its_comment(checkout):
    root = checkout(**{
        "docker/Dockerfile.ascend_9.1.0_a3": A3,
        "examples/run_glm_npu.sh": """
            #!/usr/bin/env bash
            # | Dependencies        | Branch           | Commit ID                                  |
            # | ------------------- | ---------------- | ------------------------------------------ |
            # | vllm-project/vllm   | releases/v0.23.0 | `0fc695fc6d1d82e9a5ac6835ac8e4e1c83703665` |
            # | vllm-project/vllm-ascend | releases/v0.23.0 | `dc55ef82f8236585c8f2ee237f5b43507cae8686` |
            set -euo pipefail
            python3 -m verl.trainer.main_ppo trainer.device=npu
        """,
    })  # fmt: skip
    assert told(root) == [("examples/run_glm_npu.sh:4", "vllm", "releases/v0.23.0", "branch_for_tag")]


# 8. Heads that nothing pins.
def test_heads_that_nothing_pins(checkout):
    root = checkout(**{
        "requirements-npu.txt": "TransferQueue @ git+https://github.com/Ascend/TransferQueue.git@main\n",
        "scripts/install_npu.sh": """
            git clone https://gitcode.com/Ascend/TransformerEngineNPU.git
            git clone --depth 1 https://gitcode.com/Ascend/MindSpeed-Ops.git "${WORK:-/tmp}/ops"
            git clone -b master https://gitcode.com/Ascend/MindSpeed-Bridge.git
            git -C MindSpeed-Bridge pull
            pip install git+https://github.com/Ascend/TransferQueue.git
        """,
    })  # fmt: skip
    assert told(root) == [
        ("requirements-npu.txt:1", "TransferQueue", "main", "unpinned"),
        ("scripts/install_npu.sh:1", "TransformerEngineNPU", "no ref", "unpinned"),
        ("scripts/install_npu.sh:2", "MindSpeed-Ops", "no ref", "unpinned"),
        ("scripts/install_npu.sh:3", "MindSpeed-Bridge", "master", "unpinned"),
        ("scripts/install_npu.sh:5", "TransferQueue", "no ref", "unpinned"),
    ]


# 9 and 10. The two refs that the GLM-5.2 recipe had wrong before September 2026.
def test_the_pair_of_refs_that_was_wrong_before_september_2026(checkout):
    root = checkout(**{
        "examples/run_glm_npu.sh": """
            # | NVIDIA/Megatron-LM     | core_r0.18.0 | `dc0ee41ada177d4c74ba46bb501bba5967264815` |
            # | Ascend/MindSpeed       | core_r0.18.0 | `1881e01a996074b30d424349237d55a2c608e6b7` |
            # | Ascend/MegatronAdaptor | core_r0.18.0 | `746fe27ce8a1a59ffee7a237029fccce8fac35a9` |
        """,
    })  # fmt: skip
    assert told(root) == [
        ("examples/run_glm_npu.sh:1", "Megatron-LM", "core_r0.18.0", "branch_for_tag"),
        ("examples/run_glm_npu.sh:1", "Megatron-LM", "dc0ee41ada177d4c74ba46bb501bba5967264815", "other_commit"),
        ("examples/run_glm_npu.sh:3", "MegatronAdaptor", "746fe27ce8a1a59ffee7a237029fccce8fac35a9", "other_commit"),
    ]


def test_a_cut_off_history_of_what_must_be_cloned_whole(checkout):
    root = checkout(**{
        "install_npu.sh": "git clone --depth 1 -b core_r0.18.0 https://gitcode.com/Ascend/MindSpeed.git\n",
    })  # fmt: skip
    assert told(root) == [
        ("install_npu.sh:1", "MindSpeed", "--depth", "shallow"),
        ("install_npu.sh:1", "MindSpeed", "core_r0.18.0", "moving"),
    ]


def test_what_the_table_does_not_have_may_not_differ_between_two_files(checkout):
    clone = "git clone -b {} https://github.com/o/extra.git  # for torch_npu\n"
    root = checkout(**{"a.sh": clone.format("v1.0"), "b.sh": clone.format("v1.0"), "c.sh": clone.format("v1.1")})
    (one,) = found(root)
    assert (one.file, one.found, one.wanted, one.verdict) == ("c.sh", "v1.1", "v1.0", "disagree")
    assert one.why == "a.sh:1 says v1.0"


def test_a_ref_with_shell_characters_is_told_and_never_run(checkout, tmp_path):
    root = checkout(**{"npu.sh": "cd torch_npu\ngit clone -b 'v1;touch x' https://github.com/o/extra.git\n"})
    assert told(root) == [("npu.sh:2", "extra", "v1;touch x", "no_ref")]


def test_other_generations_and_devices_are_counted_and_not_compared(checkout):
    root = checkout(**{
        "docker/Dockerfile.ascend_8.5.0_a2": """
            FROM ascendhub/cann:8.5.0-910b-ubuntu22.04-py3.11
            RUN git clone -b core_v0.12.1 https://github.com/NVIDIA/Megatron-LM.git
        """,
        "docker/Dockerfile.cuda": """
            FROM nvidia/cuda:13.0
            RUN pip install torch==2.11.0
        """,
        "docs/install.md": "    pip install vllm==0.24.0\n",
        "docs/npu.rst": """
            For SGLang on CANN:

            ============= ==========
            CANN          ``8.5.0``
            torch         ``2.8.0``
            ============= ==========
        """,
    })  # fmt: skip
    report = drift.look(stack.load(STACK), root)
    assert report.drifts == ()
    assert report.elsewhere == ("docker/Dockerfile.ascend_8.5.0_a2", "docker/Dockerfile.cuda", "docs/install.md")


def test_files_can_be_left_out(checkout):
    root = checkout(**{"old/npu.sh": "pip install torch_npu==2.8.0\n"})
    assert told(root) == [("old/npu.sh:1", "torch_npu", "==2.8.0", "excludes")]
    assert told(root, exclude=["old/*"]) == []


def test_a_folder_that_is_not_there_and_a_stack_without_refs_are_refused(tmp_path):
    with pytest.raises(RecipeError, match="no folder"):
        found(tmp_path / "none")
    with pytest.raises(RecipeError, match="no repositories"):
        found(tmp_path, "cpu")


# ------------------------------------------------------------------------------------------- reading what shells say


@pytest.mark.parametrize(("text", "expected"), [
    ("git clone -b v1 https://h/o/m.git", [(1, "m", "ref", "v1")]),
    ("git clone --branch=v1 --depth=1 https://h/o/m", [(1, "m", "shallow", "--depth"), (1, "m", "ref", "v1")]),
    ("git clone git@h:o/m.git && cd m && git checkout v1", [(1, "m", "ref", "v1")]),
    ("git clone https://h/o/m.git place\ngit -C place checkout abcdef1", [(2, "m", "commit", "abcdef1")]),
    ("git clone https://h/o/m.git\ncd m\ngit fetch origin v1\ngit checkout --detach v1", [(4, "m", "ref", "v1")]),
    ("git clone https://h/o/m.git\ncd other\ngit checkout v1", [(1, "m", "head", "")]),
    ("REF=v1\ngit clone -b \"$REF\" https://h/o/m.git", [(2, "m", "ref", "v1")]),
    ("git clone -b ${REF:-v1} https://h/o/m.git", [(1, "m", "ref", "v1")]),
    ("git clone -b \"${REF}\" https://h/o/m.git", []),
    ("git clone \\\n  -b v1 \\\n  https://h/o/m.git", [(2, "m", "ref", "v1")]),
    ("# git clone -b v1 https://h/o/m.git", []),
    ("echo 'it''s' # git clone -b v1 https://h/o/m.git", []),
    ("echo don't; git clone -b v1 https://h/o/m.git", [(1, "m", "ref", "v1")]),
    ("sudo git -c a=b clone -b v1 https://h/o/m.git", [(1, "m", "ref", "v1")]),
    ("pip install 'a==1' -r x.txt --index-url u b>=2", [(1, "a", "specifier", "==1"), (1, "b", "specifier", ">=2")]),
    ("python3 -m pip install a==1", [(1, "a", "specifier", "==1")]),
    ("uv pip install a==1", [(1, "a", "specifier", "==1")]),
    ("pip install git+ssh://git@h/o/m.git", [(1, "m", "head", "")]),
    ("pip install 'm @ git+https://h/o/m.git@v1#egg=m'", [(1, "m", "ref", "v1")]),
    ("pip install -e .", []),
])  # fmt: skip
def test_a_shell_s_own_words_are_understood(text, expected):
    source = mentions.Source("x.sh", "shell", text)
    said = shell_mentions.find(source, mentions.Names())
    assert [(m.line, m.subject, m.what, m.text) for m in said] == expected


def test_a_dockerfile_s_comments_inside_an_instruction_do_not_end_it():
    text = "ARG REF=v1\nRUN a && \\\n    # why\n    git clone -b ${REF} \\\n    https://h/o/m.git\n"
    (said,) = shell_mentions.find(mentions.Source("Dockerfile", "dockerfile", text), mentions.Names())
    assert (said.line, said.text) == (4, "v1")


def test_odd_and_hostile_text_is_read_through_in_time(checkout):
    odd = "-" * 20_000 + "\n" + "| a " * 5_000 + "\n" + "*#" * 10_000 + "\n" + "git clone 'x\n" * 500 + "CANN\n"
    root = checkout(**{"odd.md": odd, "odd.sh": "torch_npu\n" + odd, "Dockerfile": "FROM $X\n" + odd})
    (root / "binary.sh").write_bytes(bytes(range(256)) * 100)
    (root / "link.sh").symlink_to(root / "odd.sh")
    began = time.monotonic()
    found(root)
    assert time.monotonic() - began < 20
