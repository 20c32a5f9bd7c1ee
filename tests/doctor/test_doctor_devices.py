"""Are the devices those the recipe wants? On a fake node with a fake npu-smi."""

from __future__ import annotations

import pytest
from fake_node import only, sample, states

from recipes.doctor import devices

A2, A3 = "qwen3/grpo_8b_vllm_a2", "qwen3/grpo_30b_a3b_vllm_a3"


def test_a_whole_a3_node_is_in_order(fake):
    lines = list(devices.look(fake.devices(16).npu_smi("npu_smi_info_a3.txt").node(A3)))
    assert {line.state for line in lines} == {"ok"}
    assert "16 x Ascend910" in only(lines, "devices").text


def test_without_npu_smi_nothing_is_said_to_pass(fake):
    lines = list(devices.look(fake.node(A3)))
    assert states(lines, "devices") == ["error"]
    assert only(lines, "devices, health, memory, processes").state == "unseen"
    assert "ok" not in {line.state for line in lines}


def test_devices_that_are_there_but_cannot_be_asked_are_unseen_and_no_error(fake):
    lines = list(devices.look(fake.devices(8).node(A2)))
    assert only(lines, "devices, health, memory, processes").state == "unseen"
    assert not any(line.state == "error" for line in lines)


def test_a_910b3_is_an_a2_whatever_its_name_suggests(fake):
    line = only(devices.look(fake.devices(8).npu_smi("npu_smi_info_a2.txt").node(A3)), "kind")
    assert line.state == "error"
    assert line.finding.keys == {"hardware": "atlas_a3"}
    assert "atlas_a2" in line.text


def test_fewer_devices_than_the_recipe_uses(fake):
    line = only(devices.look(fake.devices(8).npu_smi("npu_smi_info_a2.txt").node(A3)), "devices")
    assert line.state == "error"
    assert line.finding.keys == {"devices": "16"}
    assert "shows 8 devices" in line.text


def test_an_ill_device_is_named(fake):
    line = only(devices.look(fake.devices(16).npu_smi("npu_smi_info_a3_busy.txt").node(A3)), "health")
    assert line.state == "error"
    assert line.finding.keys == {"device 2 (NPU 1, chip 0)": "Alarm"}


def test_processes_on_a_device_and_the_memory_they_leave(fake):
    lines = list(devices.look(fake.devices(16).npu_smi("npu_smi_info_a3_busy.txt").node(A3)))
    assert states(lines, "processes") == ["warning", "warning"]
    memory = only(lines, "free memory")
    assert memory.state == "error"
    assert "1: 12536 of 65536" in memory.text


def test_memory_is_enough_where_enough_devices_are_free(fake):
    node = fake.devices(16).npu_smi("npu_smi_info_a3_busy.txt").node(A3, "devices=8")
    assert only(devices.look(node), "free memory").state == "ok"


def test_memory_of_devices_that_are_not_visible_does_not_count(fake):
    visible = ",".join(str(n) for n in range(16) if n != 1)
    node = fake.devices(16).npu_smi("npu_smi_info_a3_busy.txt").node(A3, "devices=8", ASCEND_RT_VISIBLE_DEVICES=visible)
    assert only(devices.look(node), "free memory").text.startswith("62119 MB")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0-7", "'0-7' is no device id"), ("0,1,1", "device 1 is named twice"), ("", "'' is no device id")],
)
def test_a_list_of_devices_cann_would_not_take(text, reason):
    with pytest.raises(ValueError, match=reason):
        devices.visible(text)


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("0,1,2,3,4,5,6,7", "ok", "8 devices"),
        ("4,5,6,7", "error", "4 devices are visible, and the recipe uses 8"),
        ("1,2,3,4,5,6,7,8", "error", "no device 8; they are 0 to 7"),
        ("0..7", "error", "write them out"),
    ],
)
def test_visible_devices_against_the_recipe(fake, text, state, words):
    node = fake.devices(8).npu_smi("npu_smi_info_a2.txt").node(A2, ASCEND_RT_VISIBLE_DEVICES=text)
    line = only(devices.look(node), "visible")
    assert (line.state, words in line.text) == (state, True), line.text


def test_a_recipe_without_an_accelerator_looks_at_no_device_but_warns_of_one(fake):
    assert [line.state for line in devices.look(fake.node("quickstart/grpo"))] == ["unseen"]
    (line,) = devices.look(fake.devices(2).node("quickstart/grpo"))
    assert line.state == "warning"
    assert "2 NPUs" in line.text


def test_in_general_every_device_should_be_idle(fake):
    lines = list(devices.look(fake.devices(8).npu_smi("npu_smi_info_a2.txt").node()))
    assert only(lines, "free memory").state == "warning"
    assert "5: 24416 of 65536" in only(lines, "free memory").text


def test_devices_smaller_than_this_kind_is_known_to_have(fake, tmp_path):
    small = tmp_path / "npu_smi_small.txt"
    small.write_text(sample("npu_smi_info_a2.txt").replace("/ 65536", "/ 32768"))
    line = only(devices.look(fake.devices(8).npu_smi(str(small)).node(A2)), "size")
    assert line.state == "warning"
    assert "32768 MB" in line.text
