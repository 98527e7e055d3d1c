"""Speculation changes speed, never tokens; caches of one version never serve another."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.weightsync.embedded.test_model import on_ranks, random_checkpoint
from weightsync.embedded.config import SHAPES, eagle3_config
from weightsync.embedded.drafts import Eagle3Draft, MtpDraft, aux_layers
from weightsync.embedded.known import known_argmax, known_next
from weightsync.embedded.model import Target
from weightsync.embedded.parallel import SINGLE
from weightsync.embedded.scheduler import Request, Scheduler
from weightsync.embedded.speculative import Decoder
from weightsync.errors import ConfigError

PROMPT = [5, 17, 300, 2, 5, 480]


def load(decoder, weights):
    decoder.target.load_weights(weights["target"].items())
    if decoder.draft is not None:
        decoder.draft.load_weights(weights["draft"].items())
        decoder.draft.refresh_derived()


def make_decoder(name, draft, tp=SINGLE, dtype=torch.float32):
    config = dataclasses.replace(SHAPES[name], num_mtp_layers=int(draft == "mtp"))
    draft_config = eagle3_config(config)
    capture = aux_layers(draft_config, config.num_layers) if draft == "eagle3" else ()
    target = Target(config, tp, dtype=dtype, capture=capture)
    if draft is None:
        return Decoder(target)
    return Decoder(target, MtpDraft(target) if draft == "mtp" else Eagle3Draft(draft_config, target))


def random_decoder(name, draft, tp=SINGLE):
    decoder = make_decoder(name, draft, tp)
    weights = random_checkpoint(decoder.target.config)
    if draft == "eagle3":
        weights["draft"] = random_checkpoint(decoder.draft.config, seed=1)["draft"]
    load(decoder, weights)
    return decoder


def generate(decoder, prompt, max_tokens, num_draft=0):
    decoding = decoder.start(prompt, max_tokens=max_tokens, num_draft=num_draft)
    while decoding.remaining > 0:
        decoder.step(decoding)
    assert decoding.remaining == 0
    return decoding


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
@pytest.mark.parametrize("size", [1, 2])
def test_speculation_gives_the_tokens_of_plain_greedy_decoding(draft, size):
    def work(tp):
        decoder = random_decoder("tiny-llama", draft, tp)
        plain = generate(decoder, PROMPT, 12)
        assert plain.proposed == 0
        assert len(set(plain.generated)) > 4
        for num_draft in (1, 3, 20):
            speculated = generate(decoder, PROMPT, 12, num_draft)
            assert speculated.generated == plain.generated
            assert speculated.proposed > 0
            assert speculated.accepted <= speculated.proposed
        return plain.generated

    logits_greedy = list(PROMPT)
    target = random_decoder("tiny-llama", draft).target
    for _ in range(12):
        out = target.forward(torch.tensor(logits_greedy), target.new_cache())
        logits_greedy.append(int(target.logits(out.hidden[-1:]).argmax()))
    assert on_ranks(size, work) == logits_greedy[len(PROMPT) :]


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_a_good_draft_is_always_accepted_and_a_stale_or_bad_one_never(name, draft):
    decoder = make_decoder(name, draft, dtype=torch.bfloat16)
    config = decoder.target.config

    def acceptance(target_seed, draft_seed, good=True):
        parts = [known_argmax(config, seed=s, draft=draft, good_draft=good) for s in (target_seed, draft_seed)]
        load(decoder, {"target": parts[0]["target"], "draft": parts[1]["draft"]})
        decoding = generate(decoder, PROMPT, 20, 4)
        expected, token = [], PROMPT[-1]
        for _ in range(20):
            token = int(known_next(config, seed=target_seed, draft=draft)[token])
            expected.append(token)
        assert decoding.generated == expected
        return decoding.accepted / decoding.proposed

    assert acceptance(1, 1) == 1.0
    assert acceptance(2, 1) == 0.0
    assert acceptance(2, 2) == 1.0
    assert acceptance(2, 2, good=False) == 0.0


@pytest.mark.parametrize("draft", [None, "mtp", "eagle3"])
def test_a_reused_prefix_gives_the_same_tokens_and_the_same_acceptance(draft):
    decoder = random_decoder("tiny-llama", draft)
    num_draft = 0 if draft is None else 3
    scheduler = Scheduler(decoder, lambda: {"target": 1})

    def run(prompt):
        scheduler.add(Request(id="r", prompt=prompt, max_tokens=8, num_draft=num_draft))
        while not (results := scheduler.step()):
            pass
        return results[0]

    first = run(PROMPT)
    longer = [*PROMPT, *first.tokens[:3], 7, 8]
    fresh = generate(decoder, longer, 8, num_draft)
    again = run(longer)
    assert again.reused >= len(PROMPT) + 1
    assert again.tokens == fresh.generated
    assert (again.proposed, again.accepted) == (fresh.proposed, fresh.accepted)
    assert scheduler.prefix.hits == 1
    same = run(PROMPT)
    assert same.tokens == first.tokens
    assert same.reused in (len(PROMPT) - 1, len(PROMPT) - 2)


def test_a_prefix_of_another_version_is_never_reused():
    decoder = make_decoder("tiny", "mtp")
    version = 1
    scheduler = Scheduler(decoder, lambda: {"target": version})

    def run():
        scheduler.add(Request(id="r", prompt=PROMPT, max_tokens=8, num_draft=3))
        while not (results := scheduler.step()):
            pass
        return results[0]

    load(decoder, known_argmax(decoder.target.config, seed=1, draft="mtp", dtype=torch.float32))
    run()
    assert run().reused > 0
    version = 2
    load(decoder, known_argmax(decoder.target.config, seed=2, draft="mtp", dtype=torch.float32))
    assert run().reused == 0  # even without a flush
    assert run().reused > 0
    scheduler.new_version()
    assert len(scheduler.prefix) == 0
    assert run().reused == 0
    assert scheduler.prefix.flushes == 1


def test_pause_modes_abort_hold_or_finish_what_runs():
    decoder = random_decoder("tiny", "mtp")
    version = 1
    scheduler = Scheduler(decoder, lambda: {"target": version}, max_running=2)
    expected = generate(decoder, PROMPT, 9).generated

    def add(*ids):
        for i in ids:
            scheduler.add(Request(id=i, prompt=PROMPT, max_tokens=9, num_draft=0))

    def drain():
        results = {}
        while scheduler.has_work:
            results |= {r.id: r for r in scheduler.step()}
        return results

    add("a", "b", "c")
    for _ in range(4):
        scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    aborted = scheduler.pause("abort")
    assert [(r.id, r.finish_reason, r.tokens) for r in aborted] == [
        ("a", "abort", expected[:2]),
        ("b", "abort", expected[:2]),
    ]
    assert not scheduler.has_work
    scheduler.resume()
    scheduler.step()
    assert scheduler.pause("wait") == []
    add("d")
    assert list(drain()) == ["c"]
    assert scheduler.num_waiting == 1
    scheduler.resume()
    scheduler.step()
    assert scheduler.pause("keep") == []
    assert not scheduler.has_work
    assert scheduler.held() == [{"id": "d", "versions": [1]}]
    version = 2
    assert scheduler.new_version() == [{"id": "d", "versions": [1, 2]}]
    scheduler.resume()
    done = drain()["d"]
    assert done.tokens == expected  # the weights are the same, only the version differs
    assert done.versions == [1, 2]
    assert len(scheduler.prefix) == 0  # it spans versions
    with pytest.raises(ConfigError, match="expected one of abort, wait, keep"):
        scheduler.pause("later")


def test_a_kept_request_goes_on_with_the_new_weights():
    decoder = make_decoder("tiny", "mtp")
    config = decoder.target.config
    version = 1
    scheduler = Scheduler(decoder, lambda: {"target": version})
    load(decoder, known_argmax(config, seed=1, draft="mtp", dtype=torch.float32))
    scheduler.add(Request(id="r", prompt=PROMPT, max_tokens=12, num_draft=2))
    for _ in range(3):
        scheduler.step()
    scheduler.pause("keep")
    load(decoder, known_argmax(config, seed=2, draft="mtp", dtype=torch.float32))
    version = 2
    scheduler.new_version()
    scheduler.resume()
    while not (results := scheduler.step()):
        pass
    tokens, changed = [PROMPT[-1], *results[0].tokens], 1 + 3 + 3
    for i, (a, b) in enumerate(itertools.pairwise(tokens)):
        assert b == int(known_next(config, seed=1 if i < changed else 2, draft="mtp")[a])
    assert results[0].accepted == results[0].proposed


def test_requests_that_cannot_be_served_are_refused():
    scheduler = Scheduler(make_decoder("tiny-llama", None), dict)
    for prompt, max_tokens, words in (
        ([], 1, "at least one prompt token"),
        ([1], 0, "max_tokens >= 1"),
        ([509], 1, r"within 0\.\.508"),
        ([1] * 500, 13, "exceed the model's 512 positions"),
    ):
        with pytest.raises(ConfigError, match=words):
            scheduler.check(Request(id="r", prompt=prompt, max_tokens=max_tokens, num_draft=0))
    scheduler.add(Request(id="r", prompt=[1], max_tokens=4, num_draft=0))
    scheduler.add(Request(id="s", prompt=[1], max_tokens=4, num_draft=0))
    scheduler.step()
    assert {r.id for r in scheduler.cancel(["r", "s", "t"])} == {"r", "s"}
    assert not scheduler.has_work


@pytest.mark.parametrize("draft", ["mtp", "eagle3"])
def test_proposals_made_with_caches_are_those_of_a_full_recomputation(draft):
    decoder = random_decoder("tiny-llama", draft)
    target, model = decoder.target, decoder.draft
    forward, runs = target.forward, []

    def spy(run, cache):
        runs.append(run.tolist())
        return forward(run, cache)

    target.forward = spy
    decoding = decoder.start(PROMPT, max_tokens=10, num_draft=3)
    decoder.step(decoding)
    while decoding.remaining > 1:
        tokens = list(decoding.tokens)
        features = forward(torch.tensor(tokens[:-1]), target.new_cache()).features
        cache, expected = model.new_cache(), []
        hidden, chained = model.forward(torch.tensor(tokens[1:]), model.prepare(features), cache)
        for _ in range(min(3, decoding.remaining - 1)):
            expected.append(int(model.to_target(model.logits(hidden[-1:]).argmax(-1))))
            hidden, chained = model.forward(torch.tensor(expected[-1:]), chained[-1:], cache)
        decoder.step(decoding)
        assert runs[-1] == [tokens[-1], *expected]
    assert len(runs) > 3
