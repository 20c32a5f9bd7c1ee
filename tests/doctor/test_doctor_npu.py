"""npu-smi's tables and Ascend's version files, read from documented layouts (fakes, see samples/README.md)."""

from __future__ import annotations

import pytest
from fake_node import sample

from recipes.doctor import npu
from recipes.errors import RecipeError


def test_a2_has_one_chip_an_npu():
    info = npu.parse_info(sample("npu_smi_info_a2.txt"))
    assert info.version == "25.5.2"
    assert [(c.npu, c.chip, c.device, c.name, c.health) for c in info.chips] == [
        (n, 0, n, "910B3", "OK") for n in range(8)
    ]
    assert (info.chips[0].hbm_used, info.chips[0].hbm_total) == (3390, 65536)
    assert info.processes == (npu.Process(5, 0, 24680, "python", 37709),)
    assert info.of(info.processes[0]) == info.chips[5]


@pytest.mark.parametrize("name", ["npu_smi_info_a3.txt", "npu_smi_info_a3_wide.txt"])
def test_a3_has_two_chips_an_npu_whatever_the_width(name):
    info = npu.parse_info(sample(name))
    assert len(info.chips) == 16
    assert [(c.npu, c.chip, c.device) for c in info.chips[:4]] == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    assert {c.name for c in info.chips} == {"Ascend910"}
    assert (info.chips[15].hbm_used, info.chips[15].hbm_total) == (2877, 65536)
    assert info.processes == ()


def test_a_container_sees_processes_without_names_and_devices_in_alarm():
    info = npu.parse_info(sample("npu_smi_info_a3_busy.txt"))
    assert info.chips[2].health == "Alarm"
    assert info.processes == (npu.Process(0, 0, 31001, "", 132), npu.Process(0, 1, 31002, "", 50119))
    assert info.of(info.processes[1]).device == 1


def test_a_card_without_hbm_shows_none():
    (chip,) = npu.parse_info(sample("npu_smi_info_310p.txt")).chips
    assert (chip.npu, chip.name, chip.hbm_used, chip.hbm_total) == (2, "310P3", None, None)


def test_some_npus_of_a_node_keep_their_numbers_and_count_from_zero():
    lines = sample("npu_smi_info_a2.txt").splitlines(keepends=True)
    part = "".join(lines[:6] + lines[6 + 3 * 4 : 6 + 3 * 6])
    assert [(c.npu, c.device) for c in npu.parse_info(part).chips] == [(4, 0), (5, 1)]


@pytest.mark.parametrize("text", ["", "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n", "| | | |\n|\n||\n"])
def test_an_answer_without_a_table_is_an_error_and_never_no_devices(text):
    with pytest.raises(RecipeError, match="lists no device"):
        npu.parse_info(text)


def test_a_table_cut_off_in_a_device_drops_that_device_only():
    text = sample("npu_smi_info_a2.txt")
    cut = text[: text.index("0000:B1:00.0")]
    assert [c.npu for c in npu.parse_info(cut).chips] == [0, 1]


def test_the_board_tells_versions_and_leaves_out_what_it_does_not_know():
    board = npu.parse_board(sample("npu_smi_board_a2.txt"))
    assert board["Software Version"] == "25.5.2"
    assert board["Firmware Version"] == "7.8.0.7.220"
    assert board["PCIe Bus Info"] == "0000:C1:00.0"
    assert "Model" not in board


def test_versions_are_compared_by_numbers():
    assert npu.numbers("25.3.rc1.2") == (25, 3)
    assert npu.numbers("7.7.0.1.231") == (7, 7, 0, 1, 231)
    assert npu.numbers("none") == ()
    assert npu.intervals("[6.4.0,6.4.99],[7.0.0,8.9.9]") == [((6, 4, 0), (6, 4, 99)), ((7, 0, 0), (8, 9, 9))]


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.5.0\n", "8.5.0"),
        ("aarch64-linux/ascend_toolkit_install.info", "version=9.2.0-beta.2\n", "9.2.0-beta.2"),
        ("version.cfg", "# version: 1.0\ntoolkit_running_version=[9.1.0:CANN-9.1.0]\n", "9.1.0"),
        ("version.info", "version=[V100R001:9.1.0]\n", "9.1.0"),
        ("toolkit/version.info", sample("toolkit_version.info"), "8.2.RC1"),
    ],
)
def test_cann_is_found_by_whichever_file_its_release_writes(fake, file, text, version):
    fake.put(f"somewhere/{file}", text)
    found = npu.cann(fake.node(ASCEND_HOME_PATH=str(fake.root / "somewhere")))
    assert found["ASCEND_HOME_PATH"].version == version


def test_cann_in_the_usual_place_is_found_where_no_variable_says(fake):
    fake.put("usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info", "version=9.1.0\n")
    assert [one.version for one in npu.cann(fake.node()).values()] == ["9.1.0"]


def test_npu_smi_is_asked_once_for_the_same(fake):
    log = fake.root / "asked"
    fake.script("npu-smi", f"#!/bin/sh\n# A fake npu-smi.\necho once >> {log}\necho answer\n")
    node = fake.node()
    assert npu.ask(node, "info") == npu.ask(node, "info") == "answer\n"
    assert log.read_text() == "once\n"


def test_npu_smi_that_is_absent_fails_or_hangs_is_told_in_words(fake, monkeypatch):
    monkeypatch.setattr(npu, "ASK_SECONDS", 0.5)
    with pytest.raises(RecipeError, match="neither on PATH"):
        npu.ask(fake.node(), "info")
    fake.script("npu-smi", "#!/bin/sh\necho 'dcmi module initialize failed. ret is -8005' >&2\nexit 8\n")
    with pytest.raises(RecipeError, match="exit code 8: dcmi module initialize failed"):
        npu.ask(fake.node(), "info")
    fake.script("npu-smi", "#!/bin/sh\nsleep 60\n")
    with pytest.raises(RecipeError, match=r"did not answer within 0\.5 s"):
        npu.ask(fake.node(), "info")
