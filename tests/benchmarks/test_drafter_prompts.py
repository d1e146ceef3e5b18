"""The prompt generator: same seed, same prompts; none of them from the evaluation."""

from __future__ import annotations

import random
import re

import pytest

from benchmarks.drafter.grammar import expand, load_grammar, terminals
from benchmarks.drafter.overlap import Overlap, words
from benchmarks.drafter.prompts import generate, held_out_texts


@pytest.fixture(scope="module")
def sample() -> list[dict]:
    return list(generate(3000, seed=11))


def test_same_seed_same_prompts(sample: list[dict]) -> None:
    assert list(generate(300, seed=11)) == sample[:300]


def test_another_seed_gives_other_prompts(sample: list[dict]) -> None:
    assert list(generate(300, seed=12)) != sample[:300]


def test_no_evaluation_prompt_is_among_them(sample: list[dict]) -> None:
    held = {" ".join(words(text)) for text in held_out_texts()}
    assert not [t for item in sample for t in item["turns"] if " ".join(words(t)) in held]


def test_prompts_do_not_repeat(sample: list[dict]) -> None:
    written = [tuple(i["turns"]) for i in sample if not i["primed"]]
    assert len(set(written)) == len(written)


def test_every_kind_and_several_turns_occur(sample: list[dict]) -> None:
    _, weights = load_grammar()
    assert {i["kind"] for i in sample} == {k.removeprefix("kind.") for k in weights} | {"primed"}
    assert max(len(i["turns"]) for i in sample) >= 3


@pytest.mark.parametrize(
    "text", ["why do CATS purr", "Why do cats purr, really?", "purr cats do why", "Tell me: why do cats purr?"]
)
def test_near_duplicates_are_found(text: str) -> None:
    assert Overlap(["Why do cats purr?"]).hits(text)


def test_a_long_quotation_is_found() -> None:
    held = "Honeybees communicate the location of flowers with a movement called the waggle dance. " * 3
    assert Overlap([held]).hits("What is this: communicate the location of flowers with a movement called?")


def test_other_prompts_on_the_same_topic_are_kept() -> None:
    assert not Overlap(["Why do cats purr?"]).hits("How long do cats sleep?")


def test_every_name_in_the_grammar_is_a_rule() -> None:
    rules, _ = load_grammar()
    extra = terminals()
    for alternatives in rules.values():
        for text in alternatives:
            assert text.count("{") == text.count("}"), text
            assert set(re.findall(r"\{@(\w+)\}", text)) <= set(extra), text
            # A lone lower-case word in braces is meant as a rule.
            assert set(re.findall(r"\{([a-z]\w*)\}", text)) <= set(rules), text


def test_choices_nest() -> None:
    seen = {expand("{a|b{c|d}|}", random.Random(i), {}) for i in range(60)}
    assert seen == {"a", "bc", "bd", ""}
