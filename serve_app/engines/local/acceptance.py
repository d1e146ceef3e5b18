"""Turns target logits over a batch of trees into accepted paths.

Plain greedy requests share one argmax; sampled or penalised ones are walked one by one, and only rows that the walk
visits are processed, because a sampled row costs a pass over the vocabulary.

What this module does not do: trim at stops, or move K/V.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from serve_app.ddtree.accept import Accepted, accept_walk, walk_lazy
from serve_app.ddtree.tree import DraftTree
from serve_app.engines.local.sampler import argmax_rows, sample, uniform
from serve_app.engines.local.sequence import Sequence


def next_token(sequence: Sequence, row: Tensor, path: Seq[int] = ()) -> int:
    """The target's token after `path` (drafts behind the sequence's root), from logits [V]."""
    position = len(sequence.output) + len(path)
    if sequence.rules is not None and sequence.rules.active(position):
        row = sequence.rules.apply(row, path, position)
    return sample(row, sequence.params, uniform(sequence.seed, position))


def accept(sequences: Seq[Sequence], tree: DraftTree, logits: Tensor, depth: int) -> Accepted:
    """Sample and match.

    Args:
        sequences: the batch. logits: [B, N, V]. depth: longest path in any tree; the result is that + 1 wide.
    """
    if all(sequence.greedy for sequence in sequences):
        return accept_walk(tree.tokens, tree.parents, argmax_rows(logits), depth)
    greedy = [row for row, sequence in enumerate(sequences) if sequence.greedy]
    posterior = torch.zeros_like(tree.tokens)
    posterior[greedy] = argmax_rows(logits[greedy])
    accepted = accept_walk(tree.tokens, tree.parents, posterior, depth)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for row, sequence in enumerate(sequences):
        if sequence.greedy:
            continue
        path, bonus = _walk(sequence, tokens[row], parents[row], logits[row])
        padded = [*path, *(-1,) * (depth + 1 - len(path))]
        accepted.indices[row] = torch.tensor(padded, device=logits.device)
        accepted.lengths[row] = len(path)
        accepted.bonus[row] = bonus
    return accepted


def _walk(sequence: Sequence, tokens: list[int], parents: list[int], logits: Tensor) -> tuple[list[int], int]:
    def token_after(node: int) -> int:
        path, at = [], node
        while at > 0:
            path.append(tokens[at])
            at = parents[at]
        return next_token(sequence, logits[node], path[::-1])

    return walk_lazy(tokens, parents, token_after)
