"""The additions of the quickstart: problems, the two ways to answer, the held-out split and the tokenizer."""

from __future__ import annotations

import random
import re
import zlib
from typing import Any, NamedTuple

MIN_DIGITS, MAX_DIGITS = 2, 3
# Room for every prompt (18 to 20 tokens) and every worked solution (17 to 33 tokens with the end token). The trainer
# pads to these lengths, so slack is paid for at every step.
MAX_PROMPT_TOKENS = 20
MAX_RESPONSE_TOKENS = 36

# One pair in so many is kept for validation, whatever the seed.
HELD_OUT_ONE_IN = 10

PAD, END, START, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>"
# Exactly 32 words: an id without a word could be sampled, and its text would be lost. What no problem uses (the
# other signs of arithmetic) fills the table and is there for whoever extends the task.
WORDS = (
    *(PAD, END, START, UNKNOWN),
    *("\n", " ", "user", "assistant", "system"),
    *("What", " is", " +", "?", "+", "=", "####"),
    *(str(digit) for digit in range(10)),
    *("-", "*", "/", "(", ")", " -"),
)
WORD_IDS = {word: index for index, word in enumerate(WORDS)}
# Longest word first, so that " +" wins over " " and the two read a text alike: this expression and the tokenizer.
WORD_PATTERN = "|".join(re.escape(word) for word in sorted(WORDS, key=len, reverse=True))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Problem(NamedTuple):
    """An addition of two natural numbers."""

    first: int
    second: int

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What is {self.first} + {self.second}?"

    @property
    def answer(self) -> int:
        """The sum."""
        return self.first + self.second

    @property
    def held_out(self) -> bool:
        """Whether the pair belongs to validation: by a checksum of the unordered pair, so 2 + 3 goes with 3 + 2."""
        smaller, larger = sorted(self)
        return zlib.crc32(f"{smaller}+{larger}".encode()) % HELD_OUT_ONE_IN == 0

    @property
    def work(self) -> str:
        """The sum worked out in writing, units first, one line a column; a carry is a third term, ``7+8+1=16``."""
        lines, carry, first, second = [], 0, self.first, self.second
        while first or second:
            (first, left), (second, right) = divmod(first, 10), divmod(second, 10)
            total = left + right + carry
            lines.append(f"{left}+{right}{'+1' if carry else ''}={total}\n")
            carry = total // 10
        return "".join(lines)

    def solution(self, *, worked: bool) -> str:
        """A right answer: worked out (``2+5=7 … #### 1287``) or straight (``#### 1287``)."""
        return f"{self.work if worked else ''}#### {self.answer}"


def draw(rng: random.Random) -> Problem:
    """A problem whose numbers have ``MIN_DIGITS`` to ``MAX_DIGITS`` digits, each length equally likely."""
    lengths = (rng.randint(MIN_DIGITS, MAX_DIGITS) for _ in range(2))
    return Problem(*(rng.randrange(10 ** (length - 1), 10**length) for length in lengths))


def problems(count: int, seed: int, *, held_out: bool) -> list[Problem]:
    """``count`` problems of one side of the split, the same for the same seed; no two have the same pair of numbers.

    Raises ValueError when the smaller side, the held-out one, would be about used up.
    """
    held_out_pairs = (10**MAX_DIGITS - 10 ** (MIN_DIGITS - 1)) ** 2 // 2 // HELD_OUT_ONE_IN
    if count > held_out_pairs // 2:
        raise ValueError(f"{count} problems asked for, of about {held_out_pairs}: ask for at most half of them.")
    rng = random.Random(seed)
    chosen: dict[tuple[int, ...], Problem] = {}
    while len(chosen) < count:
        problem = draw(rng)
        if problem.held_out == held_out:
            chosen.setdefault(tuple(sorted(problem)), problem)
    return list(chosen.values())


def prompt_text(problem: Problem) -> str:
    """The prompt as the model reads it: ChatML, ending where the assistant's answer begins."""
    return f"{START}user\n{problem.question}{END}\n{START}assistant\n"


def token_ids(text: str) -> list[int]:
    """The ids of a text made of ``WORDS``, as ``tokenizer()`` gives them, without needing transformers.

    Raises ValueError, naming the place, for a character no word covers.
    """
    ids, position = [], 0
    for match in re.finditer(WORD_PATTERN, text):
        if match.start() != position:
            break
        ids.append(WORD_IDS[match.group()])
        position = match.end()
    if position != len(text):
        raise ValueError(
            f"{text[position : position + 10]!r} at character {position} is not made of the {len(WORDS)} words of "
            "the quickstart's tokenizer."
        )
    return ids


def text(ids: list[int]) -> str:
    """The text of token ids without the special tokens, as verl decodes a response."""
    return "".join(WORDS[index] for index in ids if WORDS[index] not in (PAD, END, START, UNKNOWN))


def tokenizer() -> Any:
    """The word-level ChatML tokenizer over ``WORDS`` (a ``transformers.PreTrainedTokenizerFast``).

    Lossless on what the task writes: ``decode(encode(text)) == text``. verl's token builder wants ``<|im_end|>`` and
    the line feed to be one token each.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(WORD_IDS, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
    )
