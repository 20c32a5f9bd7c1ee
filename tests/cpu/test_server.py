"""The rollout server: requests of one step share a batch, weights arrive in place, errors reach their requests."""

import asyncio
import threading

import pytest
import torch
from safetensors.torch import load_file

from recipes.cpu import server as module
from recipes.cpu.generate import Sampling
from recipes.cpu.server import Server, Weights, request_seed, sampling_of

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
GREEDY = PARAMS | {"temperature": 0}
PROMPTS = [[2, 11, 14, 17], [2, 30], [40, 41, 42], [2, 11, 14, 17]]


@pytest.fixture
def run():
    """Runs coroutines in one event loop, as a Ray actor does."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, 60))


@pytest.fixture
def server(tiny, run):
    made = Server(str(tiny("qwen3")), response_length=6, dtype="float32")
    run(made.update_weights(load_file(tiny("qwen3") / "model.safetensors"), 7))
    return made


@pytest.fixture
def ask(run):
    """Sends (prompt, parameters) all at once to a server; their outputs, in order."""

    async def all_at_once(server, asked):
        return await asyncio.gather(*(server.generate(prompt, params, "request") for prompt, params in asked))

    return lambda server, asked: run(all_at_once(server, asked))


def test_the_order_of_arrival_does_not_change_what_is_drawn(server, ask):
    asked = [(prompt, PARAMS | {"seed": seed}) for seed, prompt in enumerate(PROMPTS * 4)]
    there = ask(server, asked)
    server._repeats.clear()  # as a weight sync does
    back = ask(server, asked[::-1])[::-1]
    assert [output.token_ids for output in there] == [output.token_ids for output in back]
    assert [output.log_probs for output in there] == [output.log_probs for output in back]


def test_equal_prompts_get_different_responses_with_and_without_a_seed(server, ask):
    for params in (PARAMS, PARAMS | {"seed": 5}):
        outputs = ask(server, [(PROMPTS[0], params)] * 8)
        assert len({tuple(output.token_ids) for output in outputs}) == 8


def test_requests_that_come_together_share_a_batch(server, ask, monkeypatch):
    sizes = []

    def respond(model, requests, *rest):
        sizes.append(len(requests))
        return known(model, requests, *rest)

    known = module.respond
    monkeypatch.setattr(module, "respond", respond)
    ask(server, [(prompt, PARAMS) for prompt in PROMPTS * 4])
    assert sizes == [16]


def test_requests_that_are_sampled_differently_do_not_share_a_batch(server, ask):
    outputs = ask(server, [(PROMPTS[0], PARAMS), (PROMPTS[0], GREEDY), (PROMPTS[0], GREEDY)])
    assert outputs[1].token_ids == outputs[2].token_ids != outputs[0].token_ids


def test_outputs_name_the_weights_they_came_from(server, ask):
    (output,) = ask(server, [(PROMPTS[0], PARAMS)])
    assert output.extra_fields == {"global_steps": 7}
    assert len(output.log_probs) == len(output.token_ids) <= 6


def test_without_logprobs_none_are_sent(server, ask):
    (output,) = ask(server, [(PROMPTS[0], PARAMS | {"logprobs": False})])
    assert output.log_probs is None


def test_a_request_before_the_first_weights_is_an_error(tiny, ask):
    fresh = Server(str(tiny("qwen3")), response_length=6, dtype="float32")
    with pytest.raises(RuntimeError, match="before the trainer sent it weights"):
        ask(fresh, [(PROMPTS[0], PARAMS)])


def test_an_error_while_generating_reaches_every_request_of_the_batch_and_the_next_one_works(server, run):
    async def ask_twice():
        broken = asyncio.gather(*(server.generate(p, PARAMS, "r") for p in ([999], [2, 30])), return_exceptions=True)
        return await broken, await server.generate([2, 30], PARAMS, "r")

    errors, output = run(ask_twice())
    assert [type(error) for error in errors] == [IndexError, IndexError]
    assert output.token_ids


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop": ["x"]}, r"stop=\['x'\]"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"min_p": 0.1}, "min_p"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(params, words):
    with pytest.raises(ValueError, match=f"cannot sample with .*{words}"):
        sampling_of(PARAMS | params, 6)


def test_a_response_is_never_longer_than_the_run_allows():
    assert sampling_of(PARAMS | {"max_tokens": 100}, 6) == Sampling(6)
    assert sampling_of(PARAMS | {"max_tokens": 3}, 6) == Sampling(3)


def test_seeds_differ_in_every_part():
    seeds = {
        request_seed(*parts)
        for parts in [(1, (2, 3), 0), (2, (2, 3), 0), (1, (2, 4), 0), (1, (2, 3), 1), (None, (2, 3), 0)]
    }
    assert len(seeds) == 5


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "glm5_2"])
def test_weights_of_a_checkpoint_become_the_model_transformers_loads(tiny, name):
    from transformers import AutoModelForCausalLM

    weights = Weights(str(tiny(name, mtp=False)), torch.float32)
    weights.load(load_file(tiny(name, mtp=False) / "model.safetensors"))
    wanted = AutoModelForCausalLM.from_pretrained(tiny(name, mtp=False), dtype=torch.float32).state_dict()
    found = weights.model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_dense_model_is_filled_in_place(tiny):
    weights = Weights(str(tiny("qwen3")), torch.float32)
    model = weights.model
    weights.load({key: weight.bfloat16() for key, weight in load_file(tiny("qwen3") / "model.safetensors").items()})
    assert weights.model is model
    assert model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("name", ["qwen3", "glm5_2"])
def test_missing_weights_are_named(tiny, name):
    weights = load_file(tiny(name) / "model.safetensors")
    del weights["model.layers.1.self_attn.o_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.o_proj\.weight"):
        Weights(str(tiny(name)), torch.float32).load(weights)


class BeforeTheFourthToken(threading.Event):
    """An interruption that a response cannot miss: it waits for it with three tokens drawn."""

    def __init__(self):
        super().__init__()
        self.looks, self.drawn = 0, threading.Event()

    def is_set(self):
        self.looks += 1
        if self.looks > 3:
            self.drawn.set()
            self.wait(10)
        return self.looks > 3


def test_an_interrupted_response_goes_on_behind_what_it_has(server, run):
    """A weight sync in the middle of a batch, as verl's client sees it: abort, resume, ask again (partial rollout)."""

    async def interrupted(interrupt):
        server._interrupt = interrupt
        asked = asyncio.create_task(server.generate(PROMPTS[1], GREEDY, "request"))
        await asyncio.to_thread(interrupt.drawn.wait, 10)
        await server.abort_all_requests()
        part, server._interrupt = await asked, threading.Event()
        rest = asyncio.create_task(server.generate(PROMPTS[1] + part.token_ids, GREEDY | {"max_tokens": 3}, "request"))
        await asyncio.sleep(0.2)
        assert not rest.done()  # it waits for the weights
        await server.resume_generation()
        return part, await rest

    whole = run(server.generate(PROMPTS[1], GREEDY, "request"))
    part, rest = run(interrupted(BeforeTheFourthToken()))
    assert [output.stop_reason for output in (whole, part, rest)] == ["completed", "aborted", "completed"]
    assert (len(part.token_ids), len(part.log_probs)) == (3, 3)
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert part.log_probs + rest.log_probs == pytest.approx(whole.log_probs, abs=1e-5)


def test_a_closed_server_answers_at_once_where_it_is_told_to_reject(server, run):
    async def rejected():
        await server.abort_all_requests(reject_request=True)
        closed = await server.generate(PROMPTS[0], PARAMS, "request")
        await server.resume_generation()
        return closed, await server.generate(PROMPTS[0], PARAMS, "request")

    closed, opened = run(rejected())
    assert (closed.stop_reason, closed.token_ids) == ("aborted", [])
    assert (opened.stop_reason, bool(opened.token_ids)) == ("completed", True)
