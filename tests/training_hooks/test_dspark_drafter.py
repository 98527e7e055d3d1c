"""The plain DSpark drafter: training and drafting compute the same, training helps, its folder has rules."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from converters import ConfigMismatch, account, rules_for
from tests.converters.support import same, to_hugging_face, to_megatron
from training_hooks.capture import LayerRef, Rows
from training_hooks.drafter import Batch, DrafterTrainer, DrafterTraining
from training_hooks.dspark import DSparkLoss, RNNHead
from training_hooks.dspark_drafter import DSparkConfig, DSparkDrafter
from training_hooks.eagle3 import Eagle3Loss
from training_hooks.errors import SettingsError

VOCAB, SIZE, BLOCK, LENGTH = 24, 32, 4, 14
LAYERS = (LayerRef("input_to", 1), LayerRef("output_of", 1))
CONFIG = DSparkConfig(
    vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    layers=LAYERS, block=BLOCK, markov_rank=8,
)  # fmt: skip


def _drafter(markov="gated", dtype=torch.float32):
    torch.manual_seed(0)
    drafter = DSparkDrafter(dataclasses.replace(CONFIG, markov=markov)).to(dtype)
    with torch.no_grad():
        drafter.markov_head.out.weight.normal_(std=0.3)
    return drafter


def _world(seed, samples=12, dtype=torch.float32, scramble=False):
    """A target without layers: states and final norm at a position tell its token, which tells the next one."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    follows = torch.randperm(VOCAB, generator=fixed)
    table = torch.randn(VOCAB, SIZE, generator=fixed, dtype=torch.float64).to(dtype)
    head = torch.randn(VOCAB, SIZE, generator=fixed, dtype=torch.float64).to(dtype)
    tokens = {}
    for k in range(samples):
        ids = [int(torch.randint(0, VOCAB, (1,), generator=generator))]
        while len(ids) < LENGTH - k % 3:
            ids.append(int(follows[ids[-1]]))
        tokens[k] = torch.tensor(ids)
    every = torch.cat(list(tokens.values()))
    keys = torch.tensor([[k, i] for k, ids in tokens.items() for i in range(len(ids))])
    values = [table[every], table[every].flip(-1), head[follows[every]]]
    if scramble:
        order = torch.randperm(len(keys), generator=generator)
        values = [v[order] for v in values]
    refs = [*(ref.canonical for ref in LAYERS), LayerRef("final_norm")]
    rows = {ref: Rows(keys=keys, values=v) for ref, v in zip(refs, values, strict=True)}
    return rows, tokens, {k: torch.arange(len(t)) >= 2 for k, t in tokens.items()}, table, head


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_drafting_computes_what_training_computes(markov):
    drafter = _drafter(markov, torch.float64)
    rows, tokens, supervised, table, head = _world(1, samples=3, dtype=torch.float64)
    batch = Batch(rows, tokens, supervised, drafter.layers)
    for row, anchor in ((0, 0), (1, 3), (2, 7)):
        ids, confidence = drafter.draft(batch.features[row, :anchor], int(tokens[row][anchor]), table, head)
        where = torch.tensor([row]), torch.tensor([anchor])
        with torch.no_grad():
            hidden = drafter.blocks(batch.features, *where, table[tokens[row][anchor]][None])
            previous = torch.cat([tokens[row][anchor][None], ids[:-1]])[None]
            logits = hidden @ head.T + drafter.markov_head(previous, hidden)
            assert logits.argmax(-1)[0].tolist() == ids.tolist()
            expected = torch.sigmoid(drafter.confidence_head(hidden))[0, :, 0]
            torch.testing.assert_close(confidence, expected, rtol=0, atol=1e-12)
            # What lies at and behind the anchor is not read.
            later = batch.features.clone()
            later[row, anchor:] = float("nan") if anchor == 0 else 1e3
            if anchor:
                again = drafter.blocks(later, *where, table[tokens[row][anchor]][None])
                torch.testing.assert_close(again, hidden, rtol=0, atol=1e-12)


def test_the_rnn_head_runs_its_state_along_the_block():
    torch.manual_seed(1)
    head = RNNHead(VOCAB, 6, SIZE).double()
    torch.nn.init.normal_(head.out.weight)
    previous, hidden = torch.randint(0, VOCAB, (2, BLOCK)), torch.randn(2, BLOCK, SIZE, dtype=torch.float64)
    out = head(previous, hidden)
    state = torch.zeros(2, 6, dtype=torch.float64)
    for k in range(BLOCK):
        z = torch.cat([state, head.embedding.weight[previous[:, k]], hidden[:, k]], -1) @ head.joint.weight.T
        g, c, o = z[:, :6].sigmoid(), z[:, 6:12].tanh(), z[:, 12:].tanh()
        torch.testing.assert_close(out[:, k], o @ head.out.weight.T, rtol=1e-12, atol=1e-12)
        state = g * state + (1 - g) * c
    other = previous.clone()
    other[:, 0] = (other[:, 0] + 1) % VOCAB
    assert (head(other, hidden)[:, -1] - out[:, -1]).abs().max() > 1e-4  # a Markov head would not remember


def _accepted(drafter, seed):
    """Tokens per pass, drafting behind every position from the third on."""
    rows, tokens, supervised, table, head = _world(seed, samples=8)
    batch = Batch(rows, tokens, supervised, drafter.layers)
    total = count = 0
    for k, ids in tokens.items():
        for anchor in range(2, len(ids) - BLOCK):
            drafted, _ = drafter.draft(batch.features[k, :anchor], int(ids[anchor]), table, head)
            total += 1 + int((drafted == ids[anchor + 1 : anchor + 1 + BLOCK]).long().cumprod(0).sum())
            count += 1
    return total / count


def _trained(markov, loss, *, scramble=False, steps=6):
    """(accepted length before, after, metrics by step)"""
    drafter = _drafter(markov)
    before = _accepted(drafter, 99)
    *_, table, head = _world(0)
    config = DrafterTraining(lr=4e-3, updates=12, anchors=6, loss=loss)
    trainer = DrafterTrainer(drafter, embedding=table, head=head, config=config)
    history = []
    for step in range(steps):
        rows, tokens, supervised, *_ = _world(step, scramble=scramble)
        history.append(trainer.step(rows, tokens, supervised))
    return before, _accepted(drafter, 99), history


@pytest.mark.slow
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_training_raises_the_accepted_length(markov):
    before, after, history = _trained(markov, DSparkLoss(gamma=None))
    print(f"{markov}: accepted length {before:.2f} -> {after:.2f}")
    assert after >= before + 1
    assert history[-1]["dspark_ce"] < history[0]["dspark_ce"]
    assert history[-1]["dspark_accept"] > history[0]["dspark_accept"]


@pytest.mark.slow
def test_scrambled_rows_teach_nothing():
    # Without the cross entropy, whose labels are tokens and not rows: a Markov head learns those from any order.
    before, after, _ = _trained("gated", DSparkLoss(cross_entropy=0, gamma=None), scramble=True)
    print(f"accepted length {before:.2f} -> {after:.2f}")
    assert after <= before + 0.1


def test_a_batch_without_anchors_gives_zero_gradients():
    drafter = _drafter()
    rows, tokens, supervised, table, head = _world(3, samples=2)
    trainer = DrafterTrainer(drafter, embedding=table, head=head)
    nothing = {k: torch.zeros_like(s) for k, s in supervised.items()}
    before = {k: v.clone() for k, v in drafter.state_dict().items()}
    metrics = trainer.step(rows, tokens, nothing)
    assert metrics["tokens"] == 0
    assert metrics["drafter_norm"] == 0
    assert all(torch.equal(v, before[k]) for k, v in drafter.state_dict().items())
    with pytest.raises(SettingsError, match="DSparkLoss, not Eagle3Loss"):
        DrafterTrainer(drafter, embedding=table, head=head, config=DrafterTraining(loss=Eagle3Loss())).step(
            rows, tokens, supervised
        )


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_a_saved_drafter_is_loaded_again_and_the_rules_know_all_of_it(tmp_path, markov):
    drafter = _drafter(markov)
    drafter.save(tmp_path)
    again = DSparkDrafter.load(tmp_path)
    assert again.config.to_json() == drafter.config.to_json()
    tensors = drafter.state_dict()
    assert all(torch.equal(v, tensors[k]) for k, v in again.state_dict().items())
    config = json.loads((tmp_path / "config.json").read_text())
    rules, megatron = to_megatron(config, tensors)
    assert account(rules, tensors).ok
    assert {m.role for m in rules.mappings()} == {"draft"}
    back = to_hugging_face(rules, megatron)
    assert back.keys() == tensors.keys()
    assert all(same(back[k], tensors[k]) for k in tensors)
    for reader, error in ((rules_for, ConfigMismatch), (DSparkConfig.from_json, SettingsError)):
        with pytest.raises(error, match="dspark_version"):
            reader({**config, "dspark_version": 2})
    del config["dspark_config"]["layer_id_convention"]
    with pytest.raises(SettingsError, match="whichever its layer ids follow"):
        DSparkConfig.from_json(config)
