"""How well an SGLang engine's drafts predict its target, from its scheduler's counters or from response metadata.

Inside the scheduler `Bridge` keeps one `Counters`, samples it in every iteration of the loop and answers `status` and
`commit` with what it counted: the publisher's report makes acceptance rates of the version that a publish replaced.
Anywhere else `acceptance_of` makes the same of finished responses, also of a server that has nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsync.report import acceptance

__all__ = ["Counters", "acceptance_of"]

_NAMES = (
    # (steps, target and draft tokens) of the running log interval and of those before it, by release.
    (("spec_num_forward_ct", "spec_total_num_forward_ct"), ("spec_num_accept_tokens", "spec_total_num_accept_tokens")),
    (
        ("spec_num_forward_ct", "spec_total_num_forward_ct"),
        ("spec_num_accepted_tokens", "spec_total_num_accepted_tokens"),
    ),
)


class Counters:
    """Counts that only grow, of a scheduler whose own go back to zero whenever it flushes its prefix cache."""

    def __init__(self, scheduler: Any) -> None:
        self._holder = getattr(scheduler, "metrics_reporter", scheduler)
        proposed = getattr(scheduler.server_args, "speculative_num_draft_tokens", None)
        self._per_step = (proposed or 1) - 1
        names = next((n for n in _NAMES if all(hasattr(self._holder, x) for pair in n for x in pair)), None)
        self._names = names if self._per_step > 0 else None
        self._last, self._sums = (0, 0), (0, 0)

    def sample(self) -> None:
        """Take in what was counted since the last call; at least once between two flushes."""
        if self._names is None:
            return
        now = self._read()
        # Fewer than before: they were set back in between, and what they show was counted since then.
        base = (0, 0) if now[0] < self._last[0] else self._last
        self._sums = (self._sums[0] + now[0] - base[0], self._sums[1] + now[1] - base[1])
        self._last = now

    def _read(self) -> tuple[int, int]:
        assert self._names is not None
        steps, tokens = (sum(int(getattr(self._holder, n)) for n in pair) for pair in self._names)
        return steps, tokens

    def counts(self) -> dict[str, float]:
        """`drafts` (steps), `draft_tokens` (proposed) and `accepted_tokens` since the start; empty if none is kept."""
        self.sample()
        if self._names is None:
            return {}
        steps, tokens = self._sums
        # Every step gives one token of the target beside those of the draft that it accepts.
        return {
            "drafts": float(steps),
            "draft_tokens": float(steps * self._per_step),
            "accepted_tokens": float(tokens - steps),
        }


def acceptance_of(responses: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`spec_accept_rate` and `spec_accept_length` of finished responses of `/generate` (or `Engine.generate`).

    Weighted by steps, as one engine counts them; responses without speculation count nothing. Empty without any.
    """
    steps, proposed, accepted = 0.0, 0.0, 0.0
    for response in responses:
        meta = response["meta_info"]
        n = float(meta.get("spec_verify_ct") or 0)
        drafts = meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num"))
        correct = meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num"))
        if n > 0 and drafts is not None and correct is not None:
            steps, proposed, accepted = steps + n, proposed + float(drafts), accepted + float(correct)
    return acceptance({}, {"drafts": steps, "draft_tokens": proposed, "accepted_tokens": accepted})
