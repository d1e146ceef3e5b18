"""Per-request changes to a row of logits before sampling: penalties, bias, and end tokens that are not yet allowed.

At a tree node the tokens on the node's own path count as generated, so that a penalised request gives the same text
with and without a tree. Order: repetition, presence and frequency penalties, then bias, then banned end tokens.

What this module does not do: temperature and filters (`sampler`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from serve_app.engines.base import SamplingParams


class LogitRules:
    """The rules of one request and the tokens they count.

    Args:
        prompt: prompt token ids. vocab: V. end_tokens: ids that must not be sampled before `params.min_tokens`.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab: int,
        end_tokens: Collection[int],
        device: torch.device,
    ) -> None:
        self._params = params
        self._penalised = bool(params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty)
        self._device = device
        self._ends = _ids(sorted(end_tokens), device)
        inside = {token: bias for token, bias in params.logit_bias.items() if 0 <= token < vocab}
        self._bias_ids = _ids(list(inside), device)
        self._bias = torch.tensor(list(inside.values()), dtype=torch.float32, device=device)
        if self._penalised:
            self._seen = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._seen[_ids(prompt, device)] = True
            self._counts = torch.zeros(vocab, dtype=torch.float32, device=device)

    def active(self, position: int) -> bool:
        """Whether a row of output position `position` is changed at all."""
        return self._penalised or bool(self._bias_ids.numel()) or self._banned(position)

    def _banned(self, position: int) -> bool:
        return position < self._params.min_tokens and bool(self._ends.numel())

    def apply(self, row: Tensor, path: Sequence[int], position: int) -> Tensor:
        """A changed float32 copy of logits [V] of output index `position`; `path`: uncommitted tokens before it."""
        row = row.float().clone()
        if self._penalised:
            row = self._penalise(row, path)
        if self._bias_ids.numel():
            row[self._bias_ids] += self._bias
        if self._banned(position):
            row[self._ends] = float("-inf")
        return row

    def _penalise(self, row: Tensor, path: Sequence[int]) -> Tensor:
        params, seen, counts = self._params, self._seen, self._counts
        if path:
            extra = _ids(path, self._device)
            seen, counts = seen.clone(), counts.clone()
            seen[extra] = True
            counts.index_add_(0, extra, torch.ones_like(extra, dtype=torch.float32))
        if params.repetition_penalty != 1:
            scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row = torch.where(seen, scaled, row)
        return row - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty

    def commit(self, tokens: Sequence[int]) -> None:
        """Count emitted tokens."""
        if self._penalised and tokens:
            ids = _ids(tokens, self._device)
            self._seen[ids] = True
            self._counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))


def apply_reference(
    row: list[float],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    end_tokens: Collection[int],
) -> list[float]:
    """`LogitRules` for one row, token by token; `generated` includes the node's path."""
    out = list(row)
    for token in set(prompt) | set(generated):
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(generated):
        out[token] -= generated.count(token) * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if len(generated) < params.min_tokens:
        for token in end_tokens:
            out[token] = float("-inf")
    return out


def _ids(tokens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=device)
