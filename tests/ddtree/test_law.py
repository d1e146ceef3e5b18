"""Speculation must not change what is sampled: exact enumeration on a toy autoregressive model, in rationals."""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch

from serve_app.ddtree.accept import accept_walk, committed_tokens, walk_lazy
from serve_app.ddtree.tree import DraftTree, build_tree, chain_tree
from tests.ddtree.trees import rank_paths

VOCAB, LENGTH = 3, 4
Text = tuple[int, ...]
Law = dict[Text, Fraction]


@cache
def target(prefix: Text) -> tuple[Fraction, ...]:
    """p(next token | prefix): depends on the whole prefix, and has a zero."""
    raw = [(7 * sum((i + 2) * t for i, t in enumerate(prefix)) + 5 * token + len(prefix)) % 4 for token in range(VOCAB)]
    raw[0] += 1
    return tuple(Fraction(value, sum(raw)) for value in raw)


def autoregressive(length: int) -> Law:
    law: Law = {(): Fraction(1)}
    for _ in range(length):
        law = {(*text, token): p * q for text, p in law.items() for token, q in enumerate(target(text)) if q}
    return law


def draft(prefix: Text, shape: tuple[int, bool] | None) -> DraftTree:
    """A tree that depends on the committed prefix only. None is a chain."""
    generator = torch.Generator().manual_seed(sum(4**i * (t + 1) for i, t in enumerate(prefix)))
    logps, tokens = torch.randn(1, 3, VOCAB, generator=generator).log_softmax(2).sort(2, descending=True)
    root = torch.tensor([prefix[-1] if prefix else VOCAB])
    if shape is None:
        return chain_tree(root, tokens[:, :, 0])
    return build_tree(root, tokens, logps, shape[0], spine_first=shape[1])


def outcomes(prefix: Text, tree: DraftTree) -> Iterator[tuple[Text, Fraction]]:
    """Every emission of one verify step with its probability: all ways the visited nodes can be sampled."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()

    def explore(forced: dict[int, int], probability: Fraction) -> Iterator[tuple[Text, Fraction]]:
        unknown: list[int] = []

        def sample(node: int) -> int:
            if node not in forced:
                unknown.append(node)
                raise LookupError
            return forced[node]

        try:
            path, bonus = walk_lazy(tokens, parents, sample)
        except LookupError:
            node = unknown[0]
            context = (*prefix, *branch(node))
            for token, p in enumerate(target(context)):
                if p:
                    yield from explore({**forced, node: token}, probability * p)
        else:
            yield (*(tokens[node] for node in path[1:]), bonus), probability

    def branch(node: int) -> Text:
        return (*branch(parents[node]), tokens[node]) if node else ()

    yield from explore({}, Fraction(1))


def speculative(length: int, shape: tuple[int, bool] | None) -> Law:
    """Law of the first `length` tokens when steps repeat until there are that many."""
    done: defaultdict[Text, Fraction] = defaultdict(Fraction)
    open_: Law = {(): Fraction(1)}
    while open_:
        following: defaultdict[Text, Fraction] = defaultdict(Fraction)
        for prefix, p in open_.items():
            for emitted, q in outcomes(prefix, draft(prefix, shape)):
                text = (*prefix, *emitted)
                (done if len(text) >= length else following)[text[:length]] += p * q
        open_ = dict(following)
    return dict(done)


SHAPES = [None, (0, True), (1, True), (3, True), (3, False), (8, True), (8, False), (20, False)]


@pytest.mark.parametrize("shape", SHAPES)
def test_output_law_is_the_targets(shape: tuple[int, bool] | None) -> None:
    assert speculative(LENGTH, shape) == autoregressive(LENGTH)


@pytest.mark.parametrize("shape", SHAPES)
def test_expected_acceptance_is_the_targets_mass_on_the_tree(shape: tuple[int, bool] | None) -> None:
    tree = draft((), shape)
    mass = Fraction(0)
    for path in rank_paths(tree)[1:]:
        nodes = [rank_paths(tree).index(path[: level + 1]) for level in range(len(path))]
        text = tuple(int(tree.tokens[0, node]) for node in nodes)
        probability = Fraction(1)
        for level, token in enumerate(text):
            probability *= target(text[:level])[token]
        mass += probability
    assert sum(p * (len(emitted) - 1) for emitted, p in outcomes((), tree)) == mass


def test_greedy_emits_the_autoregressive_text() -> None:
    def argmax(prefix: Text) -> int:
        return max(range(VOCAB), key=lambda token: target(prefix)[token])

    wanted: Text = ()
    while len(wanted) < 12:
        wanted = (*wanted, argmax(wanted))
    text: Text = ()
    while len(text) < 12:
        tree = draft(text, (6, True))
        contexts: list[Text] = [()]
        for node in range(1, tree.width):
            contexts.append((*contexts[tree.parents[0, node]], int(tree.tokens[0, node])))
        posterior = torch.tensor([[argmax((*text, *context)) for context in contexts]])
        text += tuple(committed_tokens(tree.tokens, accept_walk(tree.tokens, tree.parents, posterior, 3))[0])
    assert text[:12] == wanted
