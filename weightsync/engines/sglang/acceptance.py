"""How well an SGLang engine's drafts predict its target, from what it counts of each request for its response.

Inside the scheduler `Bridge` keeps one `Counters`, samples it in every iteration of the loop and answers `status` and
`commit` with the totals, of which the publisher's report makes acceptance before and after a publish. Anywhere else
`acceptance_of` makes the same of finished responses, also of a server that has nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weightsync.report import acceptance

__all__ = ["Counters", "acceptance_of"]

_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_tokens")
"""Accepted draft tokens of a request, by release."""


class Counters:
    """Totals since the start, of the counts that SGLang keeps of each request and sends with its response.

    The scheduler's own totals would be less: they leave out what the end of a request cuts off, and go back to zero
    whenever the prefix cache is flushed.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        proposed = getattr(scheduler.server_args, "speculative_num_draft_tokens", None)
        self._per_step = (proposed or 1) - 1 if scheduler.draft_worker is not None else 0
        self._followed: dict[int, tuple[Any, int, int]] = {}
        self._steps = self._accepted = 0

    def sample(self) -> None:
        """Take in what was counted since the last call: once per iteration of the scheduler's loop."""
        if self._per_step <= 0:
            return
        for key, (request, steps, accepted) in list(self._followed.items()):
            now = _counts_of(request)
            self._steps += now[0] - steps
            self._accepted += now[1] - accepted
            if request.finished():
                del self._followed[key]
            else:
                self._followed[key] = (request, *now)
        # A request is in one of these batches before its first step and until its last.
        for batch in (self._scheduler.running_batch, self._scheduler.last_batch):
            for request in batch.reqs if batch is not None else ():
                if id(request) not in self._followed and not request.finished():
                    self._followed[id(request)] = (request, *_counts_of(request))

    def counts(self) -> dict[str, float]:
        """`drafts` (steps), `draft_tokens` (proposed) and `accepted_tokens`; empty without speculation."""
        self.sample()
        if self._per_step <= 0:
            return {}
        return {
            "drafts": float(self._steps),
            "draft_tokens": float(self._steps * self._per_step),
            "accepted_tokens": float(self._accepted),
        }


def _counts_of(request: Any) -> tuple[int, int]:
    accepted = next((getattr(request, name) for name in _ACCEPTED if hasattr(request, name)), 0)
    return int(request.spec_verify_ct), int(accepted)


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
