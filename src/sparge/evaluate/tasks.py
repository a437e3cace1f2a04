"""What a language model is asked: windows of text to predict, facts to find in long texts, texts to go on with."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparge.evaluate.texts import Encoder, Text, windows

PPL, NEEDLE, MULTIVALUE, TRACKING, GREEDY = "ppl", "needle", "multivalue", "tracking", "greedy"
TASKS = (PPL, NEEDLE, MULTIVALUE, TRACKING, GREEDY)
RETRIEVAL = (NEEDLE, MULTIVALUE, TRACKING)
CITIES = (
    "Lisbon", "Nairobi", "Osaka", "Quito", "Tallinn", "Adelaide", "Bergen", "Cusco", "Dakar", "Edmonton", "Florence",
    "Gdansk", "Havana", "Izmir", "Jakarta", "Kyoto", "Leipzig", "Medellin", "Naples", "Oslo", "Porto", "Riga",
    "Seville", "Tunis",
)  # fmt: skip
NAME_LETTERS = 5  # of a variable, as in RULER

Facts = dict[str, str | int | float]  # what a case is made of


@dataclass(frozen=True)
class Case:
    """Token ids to read, and what is judged: every token, answers inside them, or what comes after them."""

    task: str
    name: str
    ids: tuple[int, ...]
    facts: Facts = field(default_factory=dict)
    answers: tuple[tuple[int, int], ...] = ()  # (start, stop) of each answer in ids; scored one by one
    new_tokens: int = 0


@dataclass(frozen=True)
class Haystack:
    """A text, cut into tokens, that facts are hidden in."""

    encode: Encoder
    name: str
    ids: Sequence[int]


def perplexity_cases(encode: Encoder, texts: Sequence[Text], tokens: int, count: int) -> list[Case]:
    """Windows of exactly `tokens` tokens that do not overlap, `count` per text."""
    return _window_cases(PPL, encode, texts, tokens, count, 0)


def greedy_cases(encode: Encoder, texts: Sequence[Text], tokens: int, count: int, new_tokens: int) -> list[Case]:
    """The same windows, each to be continued by `new_tokens` tokens."""
    return _window_cases(GREEDY, encode, texts, tokens, count, new_tokens)


def needle_cases(
    encode: Encoder, texts: Sequence[Text], tokens: int, depths: int, draws: int, keys: int = 1, seed: int = 0
) -> list[Case]:
    """A number per city hidden in a text, and one of them asked for: at each of `depths` depths from 0 on.

    With several keys (RULER's multi-key retrieval) the others lie anywhere. Draws take the texts in turn.
    """
    if not 1 <= keys <= len(CITIES):
        raise ValueError(f"the number of keys must lie from 1 to {len(CITIES)}, not {keys}.")
    cases = []
    for depth, draw, haystack in _grid(encode, texts, depths, draws):
        name = f"{NEEDLE} {tokens} keys {keys} depth {depth:g} draw {draw}"
        chance = random.Random(f"{seed} {name}")
        cities, numbers = chance.sample(CITIES, keys), _numbers(chance, keys)
        places = [depth, *(chance.random() for _ in cities[1:])]
        hidden = [
            (place, f"The special magic number for {city} is: {number}.")
            for place, city, number in zip(places, cities, numbers, strict=True)
        ]
        question = f"What is the special magic number for {cities[0]}?"
        lead = f"The special magic number for {cities[0]} is:"
        facts: Facts = {"text": haystack.name, "tokens": tokens, "depth": depth, "keys": keys, "draw": draw}
        cases.append(_hidden(NEEDLE, name, facts, haystack, hidden, (question, lead), numbers[:1]))
    return cases


def multivalue_cases(
    encode: Encoder, texts: Sequence[Text], tokens: int, depths: int, draws: int, values: int = 4, seed: int = 0
) -> list[Case]:
    """Several numbers for one city, anywhere in the text, and all of them asked for (RULER's multi-value retrieval)."""
    cases = []
    for depth, draw, haystack in _grid(encode, texts, depths, draws):
        name = f"{MULTIVALUE} {tokens} values {values} case {depth:g} draw {draw}"
        chance = random.Random(f"{seed} {name}")
        city, numbers = chance.choice(CITIES), _numbers(chance, values)
        places = sorted(chance.random() for _ in numbers)
        hidden = [
            (place, f"One of the special magic numbers for {city} is: {number}.")
            for place, number in zip(places, numbers, strict=True)
        ]
        question = f"What are all the special magic numbers for {city} in the text above?"
        lead = f"The {values} special magic numbers for {city} are:"
        facts: Facts = {"text": haystack.name, "tokens": tokens, "values": values, "draw": draw}
        cases.append(_hidden(MULTIVALUE, name, facts, haystack, hidden, (question, lead), numbers))
    return cases


def tracking_cases(
    encode: Encoder, texts: Sequence[Text], tokens: int, depths: int, draws: int, hops: int = 4, seed: int = 0
) -> list[Case]:
    """RULER's variable tracking: one variable gets a number, each of `hops` others the one before it; name them all."""
    cases = []
    for depth, draw, haystack in _grid(encode, texts, depths, draws):
        name = f"{TRACKING} {tokens} hops {hops} case {depth:g} draw {draw}"
        chance = random.Random(f"{seed} {name}")
        letters = ["".join(chance.choices(string.ascii_uppercase, k=NAME_LETTERS)) for _ in range(hops + 1)]
        number = str(chance.randrange(10_000, 100_000))
        sources = [number, *(f"VAR {letter}" for letter in letters[:-1])]
        places = sorted(chance.random() for _ in letters)
        hidden = [
            (place, f"VAR {letter} = {source}") for place, letter, source in zip(places, letters, sources, strict=True)
        ]
        question = f"Find all variables that are assigned the value {number} in the text above."
        lead = (
            "According to the chain of variable assignment in the text above, "
            f"{len(letters)} variables are assigned the value {number}, they are:"
        )
        facts: Facts = {"text": haystack.name, "tokens": tokens, "hops": hops, "draw": draw}
        cases.append(_hidden(TRACKING, name, facts, haystack, hidden, (question, lead), letters))
    return cases


def _window_cases(
    task: str, encode: Encoder, texts: Sequence[Text], tokens: int, count: int, new_tokens: int
) -> list[Case]:
    cases = []
    for text in texts:
        found = windows(text.name, encode.whole(text), tokens - len(encode.start), count)
        for number, ids in enumerate(found):
            facts: Facts = {"text": text.name, "tokens": tokens, "window": number}
            name = f"{task} {tokens} {text.name} window {number}"
            cases.append(Case(task, name, (*encode.start, *ids), facts, new_tokens=new_tokens))
    return cases


def _grid(encode: Encoder, texts: Sequence[Text], depths: int, draws: int) -> list[tuple[float, int, Haystack]]:
    haystacks = [Haystack(encode, text.name, encode.whole(text)) for text in texts[:draws]]
    return [
        (level / depths, draw, haystacks[draw % len(haystacks)]) for level in range(depths) for draw in range(draws)
    ]


def _numbers(chance: random.Random, count: int) -> list[str]:
    return [str(number) for number in chance.sample(range(10**6, 10**7), count)]


def _hidden(
    task: str,
    name: str,
    facts: Facts,
    haystack: Haystack,
    hidden: Sequence[tuple[float, str]],  # (depth from 0 to 1, line)
    asked: tuple[str, str],  # the question, and how its answer begins
    answers: Sequence[str],
) -> Case:
    """Exactly as many tokens as the facts say: the text with the lines in it, the question, the answers."""
    encode, tokens = haystack.encode, int(facts["tokens"])
    lines = [(depth, encode(f"\n{line}\n")) for depth, line in sorted(hidden)]
    question = encode(f"\nQuestion: {asked[0]}\nAnswer: {asked[1]}")
    parts = [encode(f" {answer}") for answer in answers]
    comma = encode(",")
    fixed = len(encode.start) + sum(len(ids) for _, ids in lines) + len(question)
    room = tokens - fixed - sum(map(len, parts)) - len(comma) * (len(parts) - 1)
    if room < 0:
        raise ValueError(f"{tokens} tokens leave no room for what {task} hides and asks: give {-room} more.")
    if room > len(haystack.ids):
        raise ValueError(f"{haystack.name} holds {len(haystack.ids)} tokens, and {room} are needed to hide facts in.")
    ids, at = [*encode.start], 0
    for depth, line in lines:
        place = int(depth * room)
        ids += [*haystack.ids[at:place], *line]
        at = place
    ids += [*haystack.ids[at:room], *question]
    spans = []
    for number, part in enumerate(parts):
        ids += comma if number else []
        spans.append((len(ids), len(ids) + len(part)))
        ids += part
    return Case(task, name, tuple(ids), facts, tuple(spans))
