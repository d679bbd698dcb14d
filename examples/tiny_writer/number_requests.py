"""Requests for pictures of two-digit numbers, in words, and the prompts that right and wrong writers make of them."""

import random

NUMBERS = [f"{number:02d}" for number in range(100)]
_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
MISTAKES = ("other digit", "no quotes", "word")
"""Kinds of wrong rewrites, equally frequent."""


def in_words(number: str) -> str:
    """`42` as `forty-two`, `07` as `zero seven`."""
    tens, ones = map(int, number)
    if tens == 0:
        return f"zero {_ONES[ones]}"
    if tens == 1:
        return _TEENS[ones]
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def prompt_for(number: str) -> str:
    """The prompt that the tiny Qwen-Image has learned."""
    return f'the text "{number}"'


def wrong_prompt(number: str, rng: random.Random) -> str:
    """A rewrite with one of `MISTAKES`."""
    mistake = rng.choice(MISTAKES)
    if mistake == "no quotes":
        return f"the text {number}"
    if mistake == "word":
        return f"the number {in_words(number)}"
    place = rng.randrange(2)
    digit = rng.choice([digit for digit in "0123456789" if digit != number[place]])
    return prompt_for(number[:place] + digit + number[place + 1 :])
