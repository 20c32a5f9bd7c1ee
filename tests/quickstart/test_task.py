"""The additions, their solutions, the split and the tokenizer."""

import random

import pytest

from recipes.quickstart import task
from recipes.quickstart.reward import compute_score
from recipes.quickstart.task import Problem

PROBLEMS = [task.draw(random.Random(seed)) for seed in range(3000)]


@pytest.fixture(scope="module")
def tokenizer():
    return task.tokenizer()


def test_a_worked_solution_as_a_reader_sees_it():
    problem = Problem(472, 85)
    assert problem.question == "What is 472 + 85?"
    assert problem.solution(worked=True) == "2+5=7\n7+8=15\n4+0+1=5\n#### 557"
    assert problem.solution(worked=False) == "#### 557"


def test_each_line_of_work_is_true_and_the_lines_make_the_sum():
    for problem in PROBLEMS:
        digits, carry = [], 0
        for line in problem.work.splitlines():
            left, right = line.split("=")
            terms = [int(term) for term in left.split("+")]
            assert sum(terms) == int(right)
            assert (terms[2:] == [1]) == (carry == 1)
            digits.append(int(right) % 10)
            carry = int(right) // 10
        written = sum(digit * 10**place for place, digit in enumerate(digits)) + carry * 10 ** len(digits)
        assert written == problem.first + problem.second == problem.answer


def test_drawn_numbers_have_two_to_three_digits_of_every_length():
    lengths = {(len(str(problem.first)), len(str(problem.second))) for problem in PROBLEMS}
    assert lengths == {(2, 2), (2, 3), (3, 2), (3, 3)}


def test_the_two_sides_share_no_pair_in_any_order():
    train = {frozenset(problem) for problem in task.problems(2048, 100, held_out=False)}
    validation = {frozenset(problem) for problem in task.problems(500, 200, held_out=True)}
    assert len(train) == 2048
    assert len(validation) == 500
    assert not train & validation


def test_the_split_forgets_the_order_of_the_numbers_and_keeps_a_tenth():
    assert all(problem.held_out == Problem(problem.second, problem.first).held_out for problem in PROBLEMS)
    assert 0.08 < sum(problem.held_out for problem in PROBLEMS) / len(PROBLEMS) < 0.12


def test_problems_are_the_same_for_a_seed_different_for_another():
    chosen = task.problems(300, 7, held_out=False)
    assert chosen == task.problems(300, 7, held_out=False)
    assert chosen != task.problems(300, 8, held_out=False)


def test_more_problems_than_there_are_is_refused_rather_than_looked_for_for_ever():
    with pytest.raises(ValueError, match="100000000 problems asked for"):
        task.problems(10**8, 1, held_out=True)


def test_every_id_has_a_word_and_every_word_an_id(tokenizer):
    assert len(tokenizer) == len(task.WORDS) == len(set(task.WORDS)) == 32
    assert tokenizer.get_vocab() == task.WORD_IDS


def test_what_the_task_writes_survives_the_tokenizer(tokenizer):
    for problem in PROBLEMS[:500]:
        for text in (task.prompt_text(problem), problem.solution(worked=True), problem.solution(worked=False)):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert ids == task.token_ids(text)


def test_every_sequence_of_words_survives_decoding(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        words = rng.choices(task.WORDS, k=30)
        ids = [task.WORD_IDS[word] for word in words]
        assert tokenizer.decode(ids) == "".join(words)
        assert tokenizer.decode(ids, skip_special_tokens=True) == task.text(ids)


def test_the_chat_template_writes_the_prompt_the_warm_start_is_trained_on(tokenizer):
    problem = Problem(17, 125)
    messages = [{"role": "user", "content": problem.question}]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == task.prompt_text(
        problem
    )


def test_verl_finds_the_line_feed_and_the_end_of_turn_as_one_token_each(tokenizer):
    assert tokenizer.encode("\n") == [task.WORD_IDS["\n"]]
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [task.WORD_IDS[task.END]]


def test_the_tokenizer_is_the_same_after_saving_and_loading(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = task.prompt_text(Problem(47, 815)) + Problem(47, 815).solution(worked=True)
    assert loaded(text)["input_ids"] == task.token_ids(text)
    assert loaded.decode(task.token_ids(text)) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.pad_token_id == tokenizer.pad_token_id != loaded.eos_token_id
    assert loaded.chat_template == task.CHAT_TEMPLATE


def test_text_the_words_cannot_write_is_named():
    with pytest.raises(ValueError, match=r"'weather\?' at character 8"):
        task.token_ids("What is weather?")


def test_prompts_and_solutions_fit_the_lengths_the_run_pads_to():
    widest = Problem(999, 999)
    assert len(task.token_ids(task.prompt_text(widest))) <= task.MAX_PROMPT_TOKENS
    for problem in [widest, *PROBLEMS]:
        assert len(task.token_ids(problem.solution(worked=True) + task.END)) <= task.MAX_RESPONSE_TOKENS


def test_both_ways_of_answering_are_worth_the_same():
    for problem in PROBLEMS[:200]:
        for worked in (True, False):
            scored = compute_score("addition", problem.solution(worked=worked), str(problem.answer))
            assert scored == {"score": 1.0, "worked": float(worked)}
