"""Sampling: right probabilities, and every request on its own however they are batched."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.cpu.generate import Request, Routes, Sampling, _draw, respond

EOS, PAD = [1], 1
PROMPTS = [(2, 11, 14, 17), (2, 30), (40, 41, 42, 43, 44, 45, 46), (9,), (2, 11, 14, 17)]
REQUESTS = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module", params=["qwen3", "glm5_2"])
def model(request, tiny):
    return AutoModelForCausalLM.from_pretrained(
        tiny(request.param), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def qwen3(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny("qwen3"), dtype=torch.float32).eval()


def answer(model, requests=REQUESTS, sampling=SAMPLING):
    return respond(model, requests, sampling, EOS, PAD)


def whole_forward(model, request, response, temperature=1.0):
    """Log-probabilities of the response's tokens [tokens] from one forward pass without a cache."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*request.prompt, *response.tokens]])).logits[0]
    start = len(request.prompt) - 1
    log_probs = (logits[start:-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]


def close(found, wanted):
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(wanted), atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_whole_forward_pass(model, temperature):
    responses = answer(model, sampling=Sampling(12, temperature))
    for request, response in zip(REQUESTS, responses, strict=True):
        assert close(response.log_probs, whole_forward(model, request, response, temperature))


def test_a_request_is_answered_the_same_alone_and_in_any_company(model):
    together = answer(model)
    backwards = answer(model, REQUESTS[::-1])[::-1]
    for request, response, reversed_response in zip(REQUESTS, together, backwards, strict=True):
        (alone,) = answer(model, [request])
        assert alone.tokens == response.tokens == reversed_response.tokens
        assert close(alone.log_probs, response.log_probs)


def test_rows_that_finish_leave_the_batch_and_the_others_do_not_notice(model):
    # With half of the vocabulary ending a response, most rows are dropped while others run on.
    many = [Request(PROMPTS[seed % 5], seed) for seed in range(24)]
    ends = list(range(0, 64, 8))
    responses = respond(model, many, SAMPLING, ends, PAD)
    lengths = {len(response.tokens) for response in responses}
    assert len(lengths) > 5
    for request, response in zip(many, responses, strict=True):
        (alone,) = respond(model, [request], SAMPLING, ends, PAD)
        assert response.tokens == alone.tokens
        assert close(response.log_probs, whole_forward(model, request, response))


def test_a_response_ends_with_the_end_token_or_at_the_limit(qwen3):
    many = [Request(PROMPTS[0], seed) for seed in range(200)]
    responses = respond(qwen3, many, Sampling(6), [5, 6, 7, 8], PAD)
    assert any(response.finished for response in responses) and not all(response.finished for response in responses)
    for response in responses:
        assert response.finished == (response.tokens[-1] in (5, 6, 7, 8))
        assert not {5, 6, 7, 8} & set(response.tokens[:-1])
        assert response.finished or len(response.tokens) == 6


def test_another_seed_gives_another_response(qwen3):
    responses = answer(qwen3, [Request(PROMPTS[0], seed) for seed in range(8)])
    assert len({tuple(response.tokens) for response in responses}) == 8


def test_logits_that_are_not_numbers_draw_nothing():
    """NaN went through the search for a token as one past the last, which said nothing of the weights."""
    logits = torch.tensor([[0.0, float("nan")]])
    for sampling in (Sampling(4, temperature=1.0), Sampling(4, temperature=0)):
        with pytest.raises(FloatingPointError, match="weights the trainer sent are broken"):
            _draw(logits, torch.tensor([0.5]), sampling)


def test_tokens_are_drawn_as_often_as_they_are_likely(qwen3):
    draws = 4000
    responses = answer(qwen3, [Request(PROMPTS[0], seed) for seed in range(draws)], Sampling(1))
    counts = torch.bincount(torch.tensor([response.tokens[0] for response in responses]), minlength=64)
    with torch.inference_mode():
        probs = qwen3(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    deviation = (counts / draws - probs) / (probs * (1 - probs) / draws).sqrt()
    assert deviation.abs().max() < 5  # standard deviations, of 64 tokens


def test_greedy_takes_the_likeliest_token(model):
    for request, response in zip(REQUESTS, answer(model, sampling=Sampling(6, temperature=0)), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([[*request.prompt, *response.tokens]])).logits[0]
        assert logits.argmax(-1)[len(request.prompt) - 1 : -1].tolist() == response.tokens


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1, top_k=3), lambda probs: 3),
        (Sampling(1, top_p=0.5), lambda probs: int((probs.cumsum(0) < 0.5).sum()) + 1),
        (Sampling(1, top_k=5, top_p=0.999), lambda probs: 5),
        (Sampling(1, top_k=1000), lambda probs: 64),
    ],
)
def test_only_the_likeliest_tokens_are_drawn_and_their_probabilities_add_up(qwen3, sampling, kept):
    with torch.inference_mode():
        probs = qwen3(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).sort(descending=True)
    likeliest = probs.indices[: kept(probs.values)].tolist()
    responses = answer(qwen3, [Request(PROMPTS[0], seed) for seed in range(3000)], sampling)
    drawn = {response.tokens[0]: response.log_probs[0] for response in responses}
    assert set(drawn) <= set(likeliest)
    share = probs.values / probs.values[: len(likeliest)].sum()
    for token, log_prob in drawn.items():
        assert close(log_prob, share[likeliest.index(token)].log())


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"top_k": 0}, {"max_new_tokens": 0}]
)
def test_a_sampling_that_means_nothing_is_refused(wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=rf"cannot sample with {name}={value}"):
        Sampling(**({"max_new_tokens": 4} | wrong))


def test_an_empty_prompt_is_refused(qwen3):
    with pytest.raises(ValueError, match="empty prompt"):
        answer(qwen3, [Request((), 0)])


def test_no_requests_no_responses(qwen3):
    assert answer(qwen3, []) == []


@pytest.mark.parametrize("name", ["qwen3_moe", "glm5_2"])
def test_routes_are_the_experts_of_a_whole_forward_pass(name, tiny):
    """Also for rows that were padded, and after others had finished and left the batch."""
    model = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation="eager").eval()
    responses = respond(model, REQUESTS, SAMPLING, EOS, PAD, routes=True)
    plain = respond(model, REQUESTS, SAMPLING, EOS, PAD)
    for request, response, without in zip(REQUESTS, responses, plain, strict=True):
        assert response.tokens == without.tokens
        assert without.routes is None
        fed = [*request.prompt, *response.tokens][:-1]
        with Routes(model) as recorded, torch.inference_mode():
            model(input_ids=torch.tensor([fed]))
            whole = recorded.of_last_forward(1)[0]
        assert response.routes.shape == (len(fed), model.config.num_hidden_layers, model.config.num_experts_per_tok)
        assert response.routes.dtype == "int16"
        assert torch.equal(torch.from_numpy(response.routes).sort(-1).values, whole.sort(-1).values)
    assert len({tuple(row) for row in responses[0].routes[:, -1].tolist()}) > 1  # tokens do go to different experts


def test_a_model_without_experts_has_no_routes(qwen3):
    with pytest.raises(ValueError, match="no layer with experts"):
        respond(qwen3, REQUESTS, SAMPLING, EOS, PAD, routes=True)
