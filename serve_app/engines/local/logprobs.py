"""Log-probabilities of emitted tokens under the target's own distribution.

Raw logits in, before temperature, penalties, bias and filters: what a teacher-forced pass over the text would score.

What this module does not do: choose tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serve_app.engines.base import TokenLogprob
from serve_app.engines.local.vocabulary import Vocabulary


def token_logprobs(
    rows: Tensor, tokens: Sequence[int], alternatives: int, vocabulary: Vocabulary
) -> tuple[TokenLogprob, ...]:
    """One entry per token.

    Args:
        rows: logits [M, V], row i being the one that token i was chosen from. tokens: M ids.
        alternatives: how many of the likeliest tokens to list beside each.
    """
    scores = rows.float().log_softmax(-1)
    entries = []
    for row, token in zip(scores, tokens, strict=True):
        top: tuple[TokenLogprob, ...] = ()
        if alternatives:
            values, ids = row.topk(alternatives)
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            top = tuple(token_entry(vocabulary, other, value) for other, value in pairs)
        entries.append(token_entry(vocabulary, token, float(row[token]), top))
    return tuple(entries)


def token_entry(vocabulary: Vocabulary, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    """One token as it is reported: its text, and its bytes where it is no special token."""
    raw = b"" if vocabulary.is_special(token) else vocabulary.bytes_of(token)
    return TokenLogprob(token, vocabulary.text_of(token), tuple(raw), logprob, top)
