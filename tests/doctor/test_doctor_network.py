"""Ports and interfaces of HCCL, gloo and TensorPipe, as CANN's documentation lets them be written."""

from __future__ import annotations

import socket

import pytest
from fake_node import only, states

from recipes.doctor import network

PRESENT = {"lo": True, "eth0": True, "enp189s0f0": True, "enp189s0f1": False, "docker0": True}
ONE, SEVERAL = "qwen3/grpo_30b_a3b_vllm_a3", "glm5_2/grpo_a3_512"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("auto", None),
        ("61000-61003", (61000, 61001, 61002, 61003)),
        ("61000,61050-61051", (61000, 61050, 61051)),
        ("57000, 57005", (57000, 57005)),
    ],
)
def test_ports_as_cann_documents_them(text, found):
    assert network.ports(text) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("60050-60000", "no range within"),
        ("0-10", "no range within"),
        ("65000-70000", "no range within"),
        ("60000-60010,60005", "60005 is named twice"),
        ("60000:60050", "neither a port"),
        ("", "neither a port"),
    ],
)
def test_ports_cann_would_not_take(text, reason):
    with pytest.raises(ValueError, match=reason):
        network.ports(text)


def test_ranges_of_a_recipe_that_shares_devices_are_in_order(fake):
    lines = list(network._ports(fake.node(ONE)))
    assert states(lines, network.HOST) == states(lines, network.DEVICE) == ["ok"]
    assert only(lines, "device ports in use").state == "unseen"


def test_unset_ranges_where_training_and_rollout_share_devices(fake):
    lines = list(network._ports(fake.node(SEVERAL)))
    assert states(lines, network.HOST) == states(lines, network.DEVICE) == ["warning"]
    apart = list(network._ports(fake.node("glm5_2/fully_async")))
    assert states(apart, network.DEVICE) != ["warning"]


def test_a_range_with_a_port_for_one_process_only(fake):
    line = only(network._ports(fake.node(ONE, "env.HCCL_NPU_SOCKET_PORT_RANGE=61000")), network.DEVICE)
    assert line.state == "error"
    assert "1 ports are fewer than the 2 processes" in line.text


@pytest.mark.parametrize(
    ("base", "states_of_it"), [("50000", []), ("80", ["error"]), ("65530", ["error"]), ("x", ["error"])]
)
def test_the_base_port(fake, base, states_of_it):
    lines = list(network._ports(fake.node(SEVERAL, HCCL_IF_BASE_PORT=base)))
    assert states(lines, network.BASE) == states_of_it
    if not states_of_it:
        assert any("50000-50031" in line.text for line in lines)


def test_a_port_that_somebody_listens_on(fake):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        text = f"{port},{port + 1 if port < 65535 else port - 1}"
        line = only(network._ports(fake.node(SEVERAL, HCCL_HOST_SOCKET_PORT_RANGE=text)), "host ports in use")
    assert line.state == "error"
    assert f"the first is {port}" in line.text


def test_enough_ports_left_is_a_warning_and_none_told_is_unseen():
    assert states(network.taken(tuple(range(60000, 60032)), [60001], 2), "host ports in use") == ["warning"]
    assert states(network.taken((60000, 60001), [60001], 2), "host ports in use") == ["error"]
    assert states(network.taken((60000, 60001), [22], 2), "host ports in use") == ["ok"]
    assert states(network.taken((60000, 60001), None, 2), "host ports in use") == ["unseen"]


@pytest.mark.parametrize(
    ("dynamic", "reserved", "state"),
    [
        ("32768\t60999\n", "", "warning"),
        ("32768 60999", "60000-60050", "ok"),
        ("32768 60999", "60000-60010", "warning"),
        ("32768 59999", "", "ok"),
        (None, "", "unseen"),
        ("?", "", "unseen"),
    ],
)
def test_ports_the_kernel_gives_to_others(dynamic, reserved, state):
    (line,) = network.ephemeral(tuple(range(60000, 60051)), dynamic, reserved)
    assert line.state == state


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("eth,enp", ["enp189s0f0", "enp189s0f1", "eth0"]),
        ("=eth0,docker0", ["docker0", "eth0"]),
        ("=eth", []),
        ("^docker,lo", ["enp189s0f0", "enp189s0f1", "eth0"]),
        ("^=eth0", ["docker0", "enp189s0f0", "enp189s0f1", "lo"]),
    ],
)
def test_the_grammar_of_hccl_socket_ifname(text, names):
    assert network.chosen(text, PRESENT) == names


@pytest.mark.parametrize(
    ("variable", "text", "several", "state", "words"),
    [
        ("HCCL_SOCKET_IFNAME", "=eth0", True, "ok", "eth0"),
        ("HCCL_SOCKET_IFNAME", "=bond0", True, "error", "no such interface; it has docker0, enp189s0f0"),
        ("HCCL_SOCKET_IFNAME", "lo", True, "error", "loopback"),
        ("HCCL_SOCKET_IFNAME", "lo", False, "ok", "lo"),
        ("GLOO_SOCKET_IFNAME", "eth0", True, "ok", "eth0"),
        ("GLOO_SOCKET_IFNAME", "eth", True, "error", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", True, "error", "no such interface"),
        ("GLOO_SOCKET_IFNAME", "lo", True, "error", "loopback"),
        ("TP_SOCKET_IFNAME", "enp189s0f1", True, "error", "down"),
        ("GLOO_SOCKET_IFNAME", None, True, "warning", "need not reach"),
        ("GLOO_SOCKET_IFNAME", None, False, "ok", "one node"),
        ("TP_SOCKET_IFNAME", None, True, "ok", "not needed"),
    ],
)
def test_interfaces(variable, text, several, state, words):
    (line,) = network.interface(variable, text, PRESENT, several=several)
    assert (line.state, words in line.text) == (state, True), line.text


def test_one_name_for_all_nodes_is_warned_of():
    lines = list(network.interface("GLOO_SOCKET_IFNAME", "eth0", PRESENT, several=True, job_wide=True))
    assert [line.state for line in lines] == ["ok", "warning"]
    assert lines[1].finding.keys == {"env.GLOO_SOCKET_IFNAME": "eth0"}


def test_what_the_recipe_sets_is_looked_at_as_the_run_would_see_it(fake):
    node = fake.node(SEVERAL, "env.GLOO_SOCKET_IFNAME=no_such_interface")
    assert only(network.look(node), "GLOO_SOCKET_IFNAME").state == "error"
