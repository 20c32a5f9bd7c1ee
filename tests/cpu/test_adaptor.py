"""The external module installs itself, stays out of the way, or refuses."""

import re
import tomllib
from pathlib import Path

import pytest

from recipes.cpu import adaptor

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"

WHAT_HAPPENED = """
import torch
print("stand-ins:", torch.cuda.current_device.__module__)
"""
WITH_CUDA = "import torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2"
WITH_NPU = "import torch, types; torch.npu = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 16)"


@pytest.mark.slow
def test_verl_installs_it_and_finds_its_platform(child):
    state = (
        "import verl; from verl.plugin.platform import get_platform; print(get_platform().device_name)" + WHAT_HAPPENED
    )
    assert child("-c", state).stdout.split() == ["cpu", "stand-ins:", "recipes.cpu.torch_cuda"]


@pytest.mark.parametrize("modules", [None, "", "json", "recipes.cpu", "other.recipes.cpu.adaptor"])
def test_it_is_inert_and_imports_nothing_when_not_named(child, modules):
    loaded = "import recipes.cpu.adaptor, sys; print('torch' in sys.modules, 'verl' in sys.modules)"
    assert child("-c", loaded, VERL_USE_EXTERNAL_MODULES=modules).stdout == "False False\n"


@pytest.mark.parametrize(("accelerator", "words"), [(WITH_CUDA, "2 CUDA device(s)"), (WITH_NPU, "16 NPU(s)")])
def test_it_is_inert_beside_an_accelerator_and_says_so_in_one_line(child, accelerator, words):
    result = child("-c", f"{accelerator}\nimport recipes.cpu.adaptor{WHAT_HAPPENED}")
    assert result.stdout == "stand-ins: torch.cuda\n"
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr
    assert "ASCEND_RT_VISIBLE_DEVICES" in result.stderr


@pytest.mark.slow
def test_import_of_verl_fails_when_a_version_is_unknown(child, tmp_path):
    newer = tmp_path / "megatron_core-0.19.0.dist-info"
    newer.mkdir()
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.0\n")
    result = child("-c", "import verl", PYTHONPATH=str(tmp_path))
    assert result.returncode == 1
    sentence = result.stderr.splitlines()[-1]
    assert sentence.startswith("recipes.cpu.adaptor.UnknownVersion: ")
    for part in ("megatron-core 0.18.0", "has 0.19.0", "`cpu` extra", "VERL_USE_EXTERNAL_MODULES"):
        assert part in sentence


def test_a_missing_package_is_an_unknown_version():
    with pytest.raises(adaptor.UnknownVersion, match=r"knows no-such-package 1 or 2, .* has none"):
        adaptor.check_versions({"no-such-package": ("1", "2")})


def test_a_local_build_is_a_known_version(monkeypatch):
    monkeypatch.setattr(adaptor.importlib.metadata, "version", lambda name: "2.11.0+cpu")
    adaptor.check_versions({"torch": ("2.11.0",)})


def test_known_versions_are_those_the_package_pins():
    project = tomllib.loads(PYPROJECT.read_text())
    requirements = project["project"]["optional-dependencies"]["cpu"] + project["tool"]["recipes"]["no-deps"]
    pins = dict(re.fullmatch(r"([\w-]+)(?:\[.*])?==(\S+)", line).groups() for line in requirements if "==" in line)
    assert {name: (pins[name],) for name in adaptor.KNOWN_VERSIONS} == adaptor.KNOWN_VERSIONS
