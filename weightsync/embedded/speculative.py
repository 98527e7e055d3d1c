"""Greedy decoding with a chain of draft tokens, verified by one pass of the target; tokens equal plain greedy ones.

`Decoder.start` opens a `Decoding`, `Decoder.step` advances it by 1 to k+1 tokens; `scheduler.py` calls both on the
thread that owns the models, on every engine rank alike. The prefix cache keeps keys and values of finished requests and
gives them only to requests of the same weight version.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import torch

from weightsync.embedded.drafts import Draft
from weightsync.embedded.kv import KVCache
from weightsync.embedded.model import Target

__all__ = ["Decoder", "Decoding", "PrefixCache"]


@dataclasses.dataclass(kw_only=True, slots=True)
class Decoding:
    """One sequence. `tokens` is the prompt and what was generated; all but the last token are in `cache`.

    `features` are the target's for the positions that `cache` has and `draft_cache` has not: the draft reads them at
    the next step. None before the first step, and when everything must be computed again.
    """

    tokens: list[int]
    num_prompt: int
    max_tokens: int
    num_draft: int
    cache: KVCache
    draft_cache: KVCache | None
    features: torch.Tensor | None = None
    proposed: int = 0
    accepted: int = 0
    reused: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def remaining(self) -> int:
        return self.num_prompt + self.max_tokens - len(self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    cache: KVCache
    draft_cache: KVCache | None


class PrefixCache:
    """Keys and values by token prefix, the `capacity` most recently used ones, all of one weight version (`stamp`)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hits = 0
        self.flushes = 0
        self._stamp: Hashable = None
        self._entries: collections.OrderedDict[tuple[int, ...], _Entry] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def flush(self) -> None:
        self._entries.clear()
        self.flushes += 1

    def put(self, decoding: Decoding, stamp: Hashable) -> None:
        """Remember a finished decoding that was computed under `stamp` from its first to its last token."""
        if stamp != self._stamp:
            # Whoever forgot to flush must not mix versions.
            self._entries.clear()
            self._stamp = stamp
        key = tuple(decoding.tokens[: decoding.cache.length])
        if self.capacity and key:
            self._entries[key] = _Entry(decoding.cache, decoding.draft_cache)
            self._entries.move_to_end(key)
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)

    def take(self, prompt: Sequence[int], stamp: Hashable, *, draft: bool) -> tuple[KVCache, KVCache | None] | None:
        """Copies of the caches of the longest usable prefix, or None.

        At least the last token is computed again (its logits are wanted). With a draft one more is: the draft's state
        at a position depends on the token after it, and on target features that are not kept.
        """
        if stamp != self._stamp:
            return None
        best, length = None, 0
        for key, entry in self._entries.items():
            if draft and entry.draft_cache is None:
                continue
            common = next((i for i, (a, b) in enumerate(zip(key, prompt, strict=False)) if a != b), len(key))
            usable = min(common, len(prompt) - 1)
            if draft and entry.draft_cache is not None:
                usable = min(usable - 1, entry.draft_cache.length)
            if usable > length:
                best, length = key, usable
        if best is None:
            return None
        self.hits += 1
        self._entries.move_to_end(best)
        entry = self._entries[best]
        draft_cache = entry.draft_cache.copy_prefix(length) if draft and entry.draft_cache is not None else None
        return entry.cache.copy_prefix(length), draft_cache


class Decoder:
    """Target and draft of one engine rank, decoding. `draft` None: one token per step."""

    def __init__(self, target: Target, draft: Draft | None = None) -> None:
        self.target = target
        self.draft = draft

    def start(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        num_draft: int = 0,
        prefix: tuple[KVCache, KVCache | None] | None = None,
    ) -> Decoding:
        """`num_draft` tokens are proposed per step, 0 for plain decoding; `prefix` comes from `PrefixCache.take`."""
        speculate = self.draft is not None and num_draft > 0
        decoding = Decoding(
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_tokens=max_tokens,
            num_draft=num_draft if speculate else 0,
            cache=self.target.new_cache(),
            draft_cache=self.draft.new_cache() if self.draft is not None and speculate else None,
        )
        if prefix is not None:
            decoding.cache, decoding.draft_cache = prefix
            decoding.reused = decoding.cache.length
        return decoding

    def restart(self, decoding: Decoding) -> None:
        """The weights changed: compute keys, values and features of all tokens again at the next step."""
        decoding.cache = self.target.new_cache()
        decoding.features = None
        if decoding.draft_cache is not None and self.draft is not None:
            decoding.draft_cache = self.draft.new_cache()

    def step(self, decoding: Decoding) -> list[int]:
        """Advance by one target pass; returns the tokens that it brought (at least one)."""
        d = decoding
        guesses = self._propose(d) if d.features is not None else []
        run = [*d.tokens[d.cache.length :], *guesses]
        out = self.target.forward(torch.tensor(run, device=self.target.device), d.cache)
        logits = self.target.logits(out.hidden[-len(guesses) - 1 :])
        choice = self.target.tp.agree(logits.argmax(-1)).tolist()
        accepted = next((i for i, guess in enumerate(guesses) if guess != choice[i]), len(guesses))
        rejected = len(guesses) - accepted
        d.cache.truncate(d.cache.length - rejected)
        if d.draft_cache is not None:
            d.features = out.features[: len(run) - rejected]
        d.proposed += len(guesses)
        d.accepted += accepted
        new: list[int] = choice[: accepted + 1]
        d.tokens += new
        return new

    def _propose(self, d: Decoding) -> list[int]:
        """Bring the draft's cache up to the target's with true features, then chain on its own states."""
        count = min(d.num_draft, d.remaining - 1)
        if self.draft is None or d.draft_cache is None or d.features is None or count <= 0:
            return []
        known = torch.tensor(d.tokens[d.draft_cache.length + 1 :], device=self.target.device)
        hidden, chained = self.draft.forward(known, self.draft.prepare(d.features), d.draft_cache)
        true_length = d.draft_cache.length
        guesses: list[int] = []
        while True:
            best = self.draft.to_target(self.draft.logits(hidden[-1:]).argmax(-1))
            token = self.target.tp.agree(best)
            guesses.append(int(token))
            if len(guesses) == count:
                break
            hidden, chained = self.draft.forward(token, chained[-1:], d.draft_cache)
        d.draft_cache.truncate(true_length)
        return guesses
