"""What differs between nodes, by answers made up here and by an interpreter that is a fake. No Ray is started."""

from __future__ import annotations

import json

import pytest
from fake_node import only, states

from recipes import doctor, params
from recipes.doctor import cluster
from recipes.errors import RecipeError

SEVERAL = "glm5_2/grpo_a3_512"


def answer(devices=16, skew=0.0, address="10.0.0.1", **facts):
    return {
        "address": address,
        "devices": devices,
        "facts": {"verl": "0.9.1", "torch": "2.10.0", **facts},
        "skew": skew,
        "way": 0.01,
    }


def test_nodes_that_are_alike_are_in_order():
    (line,) = cluster.compare({"10.0.0.1": answer(), "10.0.0.2": answer(skew=0.4)})
    assert line.state == "ok"
    assert "2 nodes" in line.text


def test_the_node_that_differs_is_named_with_what_most_have():
    nodes = {"10.0.0.1": answer(), "10.0.0.2": answer(torch="2.9.0"), "10.0.0.3": answer()}
    (line,) = cluster.compare(nodes)
    assert line.state == "error"
    assert line.finding.keys == {"node": "10.0.0.2", "torch": "2.9.0"}
    assert "2 of 3 nodes have 2.10.0" in line.text


def test_a_variable_that_differs_is_a_warning():
    nodes = {"10.0.0.1": answer(PYTHONPATH="/a"), "10.0.0.2": answer(PYTHONPATH="/a"), "10.0.0.3": answer()}
    (line,) = cluster.compare(nodes)
    assert line.state == "warning"
    assert line.finding.keys == {"node": "10.0.0.3", "PYTHONPATH": "none"}


@pytest.mark.parametrize(("skew", "state", "words"), [(4.2, "warning", "4.2 s ahead of"), (-3.0, "warning", "behind")])
def test_a_clock_that_is_off(skew, state, words):
    (line,) = cluster.compare({"10.0.0.1": answer(), "10.0.0.2": answer(skew=skew)})
    assert (line.state, words in line.text) == (state, True)
    assert line.finding.keys == {"node": "10.0.0.2"}


def test_a_slow_way_to_a_node_is_no_wrong_clock():
    slow = answer(skew=2.0) | {"way": 1.5}
    assert [line.state for line in cluster.compare({"10.0.0.1": slow})] == ["ok"]


def test_a_node_that_is_silent_is_an_error_and_no_answer_at_all_is_unseen():
    lines = list(cluster.compare({"10.0.0.1": answer(), "10.0.0.2": {"devices": 16, "fault": "GetTimeoutError"}}))
    assert states(lines, "node") == ["error"]
    assert states(lines, "differences") == ["ok"]
    assert states(cluster.compare({}), "differences") == ["unseen"]


def test_devices_of_all_nodes_against_the_recipe(fake):
    node = fake.node(SEVERAL)
    nodes = {f"10.0.0.{n}": answer() for n in range(32)}
    assert [line.state for line in cluster.resources(node, nodes)] == ["ok"]
    nodes["10.0.0.7"] = answer(devices=8)
    (line,) = cluster.resources(node, nodes)
    assert line.state == "error"
    assert "wants 512 devices, and Ray counts 504" in line.text


def test_training_and_generation_apart_want_the_devices_of_both(fake):
    nodes = {f"10.0.0.{n}": answer() for n in range(31)}
    (line,) = cluster.resources(fake.node("glm5_2/fully_async"), nodes)
    assert "wants 512 devices, and Ray counts 496" in line.text


def test_without_a_cluster_nodes_are_unseen_where_there_are_several(fake):
    assert [line.state for line in cluster.look(fake.node(SEVERAL), None, 1)] == ["unseen"]
    assert [line.state for line in cluster.look(fake.node("quickstart/grpo"), None, 1)] == ["ok"]
    assert [line.state for line in cluster.look(fake.node(), None, 1)] == ["unseen"]


def test_a_cluster_is_asked_by_the_interpreter_that_trains(fake):
    told = {"a" * 56: answer(address="10.0.0.1"), "b" * 56: answer(address="10.0.0.2", verl="0.9.0")}
    python = interpreter(fake, told)
    lines = list(cluster.look(fake.node(python=str(python)), "10.0.0.1:6379", 10))
    assert only(lines, "differences").state == "error"


def interpreter(fake, told):
    return fake.script(
        "fake-python", f"#!/bin/sh\n# A fake interpreter.\necho noise\necho '{cluster.MARK}{json.dumps(told)}'\n"
    )


def test_two_nodes_with_one_address_are_two_nodes(fake):
    told = {letter * 56: answer(address="10.0.0.1") for letter in "ab"} | {"c" * 56: answer(address="10.0.0.3")}
    told["b" * 56]["facts"]["torch"] = "2.9.0"
    answers = cluster.ask(fake.node(python=str(interpreter(fake, told))), "10.0.0.1:6379", 10)
    assert list(answers) == ["10.0.0.1 (aaaaaaaa)", "10.0.0.1 (bbbbbbbb)", "10.0.0.3"]
    assert only(cluster.compare(answers), "differences").finding.keys["node"] == "10.0.0.1 (bbbbbbbb)"


@pytest.mark.parametrize("key", cluster.LIMITS)
def test_a_limit_that_differs_is_a_warning_and_a_cann_that_differs_an_error(key):
    nodes = {f"10.0.0.{n}": answer(CANN="9.1.0", **{key: "64"}) for n in (1, 2, 3)}
    nodes["10.0.0.2"]["facts"][key] = "1024"
    assert only(cluster.compare(nodes), "differences").state == "warning"
    nodes["10.0.0.2"]["facts"] |= {key: "64", "CANN": "8.5.0"}
    assert only(cluster.compare(nodes), "differences").state == "error"


def test_the_cluster_is_the_one_asked_for_then_the_recipes_then_the_environments(fake, monkeypatch):
    asked = []
    monkeypatch.setattr(cluster, "look", lambda node, address, deadline: asked.append(address) or ())
    for name in ("versions", "devices", "machine", "network", "software", "model", "data"):
        monkeypatch.setattr(getattr(doctor, name), "look", lambda *given: ())
    own = params.compose("cpu/qwen3", ["ray_address=http://head:8265"])
    other = {"RAY_ADDRESS": "http://other:8265"}
    for composed, address, environment in [
        (own, "10.0.0.9:6379", other),
        (own, None, other),
        (params.compose("cpu/qwen3"), None, other),
        (None, None, other),
        (own, None, {}),
        (None, None, {}),
    ]:
        list(doctor.examine(composed, python="python", environment=environment, address=address))
    assert asked == ["10.0.0.9:6379", "http://head:8265", *2 * ["http://other:8265"], "http://head:8265", None]


def test_a_cluster_that_does_not_answer_is_unseen(fake):
    python = fake.script(
        "fake-python", "#!/bin/sh\necho 'ConnectionError: could not find any running Ray' >&2\nexit 1\n"
    )
    line = only(cluster.look(fake.node(python=str(python)), "10.0.0.1:6379", 10), "nodes")
    assert line.state == "unseen"
    assert "could not find any running Ray" in line.text
    fake.script("fake-python", "#!/bin/sh\necho 'RPC error: InvalidAuthToken' >&2\necho ConnectionError >&2\nexit 1\n")
    assert "RAY_AUTH_TOKEN" in only(cluster.look(fake.node(python=str(python)), "10.0.0.1:6379", 10), "nodes").text
    python = fake.script("fake-python", "#!/bin/sh\nsleep 60\n")
    with pytest.raises(RecipeError, match="did not answer within 1 s"):
        cluster.ask(fake.node(python=str(python)), "10.0.0.1:6379", 1)
