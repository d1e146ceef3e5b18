"""Random draft inputs and slow, obviously correct versions, shared by the tests of the draft-tree core."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from serve_app.ddtree.tree import DraftTree, max_nodes


@dataclass(frozen=True)
class Drafts:
    roots: Tensor
    tokens: Tensor
    logps: Tensor
    budget: int
    spine_first: bool

    @property
    def depth(self) -> int:
        return self.logps.shape[1]


def random_drafts(seed: int, batch: int, depth: int, k: int, *, quantum: float = 0.0, holes: float = 0.0) -> Drafts:
    """Budget 0 and spine-first; `quantum` rounds log-probs (ties), `holes` is the share of -inf."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(batch, depth, k, generator=generator)
    if quantum:
        logps = (logps / quantum).round() * quantum
    logps[torch.rand(logps.shape, generator=generator) < holes] = -torch.inf
    logps = logps.sort(2, descending=True).values
    tokens = torch.rand(batch, depth, 50, generator=generator).argsort(2)[:, :, :k]
    return Drafts(torch.arange(batch) + 100, tokens, logps, 0, True)


@st.composite
def drafts(draw: st.DrawFn, max_budget: int = 40, max_depth: int = 5) -> Drafts:
    depth, k = draw(st.integers(1, max_depth)), draw(st.integers(1, 5))
    quantum = draw(st.sampled_from([0.0, 0.5, 1.0, 10.0]))
    made = random_drafts(
        draw(st.integers(0, 2**31)),
        draw(st.integers(1, 3)),
        depth,
        k,
        quantum=quantum,
        holes=draw(st.sampled_from([0.0, 0.3])),
    )
    budget = draw(st.integers(0, min(max_budget, max_nodes(depth, k))))
    return Drafts(made.roots, made.tokens, made.logps, budget, draw(st.booleans()))


def row(tree: DraftTree, index: int) -> DraftTree:
    """One request's tree, B = 1, on the CPU."""
    return DraftTree(*(getattr(tree, f.name)[index : index + 1].cpu() for f in fields(tree)))


def assert_same(left: DraftTree, right: DraftTree) -> None:
    for f in fields(left):
        assert torch.equal(getattr(left, f.name), getattr(right, f.name)), f.name


def rank_paths(tree: DraftTree, index: int = 0) -> list[tuple[int, ...]]:
    """The rank tuple of every node of one request, root (empty) first."""
    parents, ranks = tree.parents[index].tolist(), tree.ranks[index].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        paths.append((*paths[parents[node]], ranks[node]))
    return paths


def all_paths(depth: int, k: int) -> Iterator[tuple[int, ...]]:
    for level in range(1, depth + 1):
        yield from itertools.product(range(k), repeat=level)


def weight(logps: Tensor, path: Sequence[int]) -> np.float32:
    """Float32 sum from the root down, logps [D, K]."""
    total = np.float32(0)
    for level, rank in enumerate(path):
        total = total + np.float32(logps[level, rank].item())
    return total


def random_parents(seed: int, size: int) -> list[int]:
    """Any tree with parent index < child index."""
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
