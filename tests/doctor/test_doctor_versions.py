"""Do driver, firmware and CANN fit each other and the stack? On a fake node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_node import only, sample, states

from recipes import stack
from recipes.doctor import versions

A2 = "qwen3/grpo_8b_vllm_a2"


def ready(fake):
    fake.devices(8).npu_smi("npu_smi_info_a2.txt").cann()
    fake.put("usr/local/Ascend/driver/version.info", sample("driver_version.info"))
    return fake


def test_a_node_with_the_stacks_versions_is_in_order(fake):
    lines = list(versions.look(ready(fake).node(A2)))
    assert {line.state for line in lines} == {"ok"}
    assert only(lines, "CANN").text.startswith("9.1.0 by ASCEND_HOME_PATH")


def test_without_anything_all_is_unseen_but_the_cann_that_is_missing(fake):
    lines = list(versions.look(fake.node(A2)))
    assert states(lines, "driver") == states(lines, "firmware") == ["unseen"]
    assert states(lines, "CANN") == ["error"]


def test_in_general_a_machine_without_npu_needs_no_cann(fake):
    assert states(versions.look(fake.node()), "CANN") == ["unseen"]
    assert states(versions.look(fake.devices(1).node()), "CANN") == ["error"]


@pytest.mark.parametrize(
    ("driver", "state"), [("25.0.rc1.1", "error"), ("24.1.rc3", "error"), ("25.2.0", "ok"), ("26.0.rc2", "ok")]
)
def test_cann_9_1_runs_on_drivers_from_25_2_on(fake, tmp_path, driver, state):
    board = tmp_path / "board.txt"
    board.write_text(sample("npu_smi_board_a2.txt").replace("25.5.2", driver))
    ready(fake).npu_smi("npu_smi_info_a2.txt", board=str(board))
    assert only(versions.look(fake.node(A2)), "driver for CANN").state == state


def test_a_cann_no_table_knows_is_unseen(fake):
    node = replace(ready(fake).node(A2), stack=replace(stack.load("ascend-9.1.0"), cann="9.7.0"))
    line = only(versions.look(node), "driver for CANN")
    assert line.state == "unseen"
    assert "CANN 9.7.0" in line.text


def test_the_driver_that_runs_is_not_the_one_installed(fake):
    ready(fake).put("usr/local/Ascend/driver/version.info", sample("driver_version.info").replace("25.5.2", "25.2.0"))
    line = only(versions.look(fake.node(A2)), "driver")
    assert line.state == "warning"
    assert "25.2.0" in line.text
    assert "npu-smi=25.5.2" in line.text


def test_a_driver_known_by_its_file_only_is_said_to_be_unconfirmed(fake):
    fake.devices(8).put("usr/local/Ascend/driver/version.info", sample("driver_version.info"))
    assert "npu-smi did not confirm it" in only(versions.look(fake.node(A2)), "driver").text


def test_firmware_outside_what_the_driver_names(fake):
    fake.put("usr/local/Ascend/driver/version.info", sample("driver_version.info").replace("7.8.99", "7.5.99"))
    fake.put("usr/local/Ascend/firmware/version.info", sample("firmware_version.info"))
    line = only(versions.look(fake.node(A2)), "firmware")
    assert line.state == "error"
    assert line.finding.keys["firmware"] == "7.8.0.7.220"


def test_firmware_the_driver_itself_refuses(fake, tmp_path):
    board = tmp_path / "board.txt"
    board.write_text(sample("npu_smi_board_a2.txt").replace(": OK", ": NOT OK"))
    ready(fake).npu_smi("npu_smi_info_a2.txt", board=str(board))
    assert only(versions.look(fake.node(A2)), "firmware").state == "error"


def test_another_cann_than_the_stack_wants(fake):
    fake.cann(sample("ascend_toolkit_install.info").replace("9.1.0", "8.5.0"))
    line = only(versions.look(fake.node(A2)), "CANN")
    assert line.state == "error"
    assert "CANN 8.5.0 is there, and the stack wants 9.1.0" in line.text


def test_cann_installed_but_not_sourced(fake):
    fake.put("usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info", "version=9.1.0\n")
    line = only(versions.look(fake.node(A2)), "CANN")
    assert line.state == "error"
    assert "set_env.sh" in line.text


def test_two_variables_for_two_canns(fake):
    ready(fake).put("old/version.cfg", "toolkit_running_version=[8.5.0:CANN-8.5.0]\n")
    lines = versions.look(fake.node(A2, ASCEND_TOOLKIT_HOME=str(fake.root / "old")))
    assert any("different versions (8.5.0, 9.1.0)" in line.text for line in lines)


def test_a_variable_that_names_no_cann(fake):
    line = only(versions.look(fake.node(A2, ASCEND_HOME_PATH=str(fake.root / "nowhere"))), "CANN")
    assert line.state == "error"
    assert "no file that tells a version" in line.text


def test_verl_cannot_start_a_vllm_rollout_without_npu_smi(fake):
    line = only(versions.look(fake.devices(8).node(A2)), "npu-smi")
    assert line.state == "error"
    assert "get_npu_versions" in line.finding.source


def test_only_the_verl_that_was_read_is_spoken_of(fake):
    older = replace(fake.devices(8).node(A2), stack=stack.load("ascend-9.0.0"))
    assert states(versions.look(older), "npu-smi") == ["unseen"]


def test_verl_asks_npu_1_or_the_first_it_is_told(fake, tmp_path):
    lines = sample("npu_smi_info_a2.txt").splitlines(keepends=True)
    part = tmp_path / "part.txt"
    part.write_text("".join(lines[:6] + lines[6 + 3 * 4 : 6 + 3 * 8]))
    ready(fake).npu_smi(str(part))
    assert states(versions.look(fake.node(A2)), "npu-smi") == ["error", "ok"]
    assert states(versions.look(fake.node(A2, ASCEND_VISIBLE_DEVICES="4")), "npu-smi") == ["ok"]


def test_weights_pass_in_device_memory_from_these_versions_on(fake, tmp_path):
    assert versions.ipc(fake.node(A2)) is None
    assert versions.ipc(ready(fake).node(A2)) is True
    board = tmp_path / "board.txt"
    for driver, new in {"25.3.rc1.2": True, "25.5.t3.b001": True, "25.2.0": False}.items():
        board.write_text(sample("npu_smi_board_a2.txt").replace("25.5.2", driver))
        assert versions.ipc(fake.npu_smi("npu_smi_info_a2.txt", board=str(board)).node(A2)) is new, driver
