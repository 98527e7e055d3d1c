"""The plain EAGLE3 drafter against the engine that decodes with it: same logits, and training raises acceptance."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.support import spawn_ranks
from training_hooks.capture import LayerRef, Rows
from training_hooks.drafter import DrafterTrainer, DrafterTraining
from training_hooks.eagle3 import Eagle3Loss
from training_hooks.eagle3_drafter import Eagle3Config, Eagle3Drafter
from training_hooks.errors import CaptureError, SettingsError
from weightsync.embedded.config import ModelConfig, eagle3_config
from weightsync.embedded.drafts import Eagle3Draft
from weightsync.embedded.model import Target
from weightsync.embedded.speculative import Decoder

VOCAB, DRAFT_VOCAB, SIZE = 48, 40, 32
IDS = (1, 2, 3)
LAYERS = tuple(LayerRef("input_to", i) for i in IDS)
FINAL = LayerRef("final_norm")
D2T = torch.cat([torch.zeros(20, dtype=torch.int64), torch.full((20,), 8)])

TARGET = ModelConfig(
    family="llama", vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=8, max_positions=128,
)  # fmt: skip


def _config():
    return Eagle3Config(
        vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, hidden_size=SIZE, intermediate_size=48, num_heads=4,
        num_kv_heads=2, head_dim=8, layers=LAYERS, rms_norm_eps=TARGET.rms_norm_eps, rope_theta=TARGET.rope_theta,
    )  # fmt: skip


def _target(seed, dtype=torch.float32):
    target = Target(TARGET, dtype=dtype, capture=IDS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * drawn if "norm" in name else drawn * parameter.shape[-1] ** -0.5)
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.4)  # a next token that depends on the last ones rather than on all alike
        target.model.embed_tokens.weight.mul_(SIZE**0.5)
        target.lm_head.weight.mul_(4)
    return target


def _drafter(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Eagle3Drafter(_config(), D2T).to(dtype)


def _served(drafter, target):
    """The engine's drafter with these weights, loaded by name."""
    config = dataclasses.replace(eagle3_config(TARGET, draft_vocab_size=DRAFT_VOCAB), aux_layers=IDS)
    draft = Eagle3Draft(config, target)
    taken = draft.load_weights((k, v.detach()) for k, v in drafter.state_dict().items())
    assert {"fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight", "d2t", "t2d"} <= set(taken)
    draft.refresh_derived()
    return draft


def _weights(target):
    return target.model.embed_tokens.weight[:VOCAB], target.lm_head.weight[:VOCAB]


def test_the_unroll_computes_what_decoding_computes():
    target, drafter = _target(1, torch.float64), _drafter(dtype=torch.float64)
    draft = _served(drafter, target)
    tokens = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(3))
    features = target.forward(tokens, target.new_cache()).features
    steps, rows = 3, len(tokens) - 3
    table = _weights(target)[0]
    embedded = [table[tokens[i + 1 : i + 1 + rows]][None] for i in range(steps)]
    with torch.no_grad():
        unrolled = drafter.unroll(features[None, :rows], embedded)
    for t in range(rows):
        cache = draft.new_cache()
        hidden, chained = draft.forward(tokens[1 : t + 2], draft.prepare(features[: t + 1]), cache)
        for i in range(steps):
            got = draft.logits(hidden[-1:])[0]
            torch.testing.assert_close(got, unrolled[i][0, t].to(got.dtype), rtol=1e-5, atol=1e-6)
            if i + 1 < steps:
                hidden, chained = draft.forward(tokens[t + 2 + i : t + 3 + i], chained[-1:], cache)


def _rollout(target, seed, count=32, length=8):
    """Greedy continuations of random prompts: {sample: tokens}."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for sample in range(count):
        decoder = Decoder(target)
        prompt = torch.randint(0, VOCAB, (4,), generator=generator).tolist()
        decoding = decoder.start(prompt, max_tokens=length)
        while decoding.remaining > 0:
            decoder.step(decoding)
        out[sample] = torch.tensor(decoding.tokens)
    return out


def _capture(target, rollout, scramble=None):
    """Rows of the drafter's layers and the final norm; with `scramble`, under the keys of other rows."""
    outputs = [target.forward(tokens, target.new_cache()) for tokens in rollout.values()]
    keys = torch.tensor([[k, i] for k, tokens in rollout.items() for i in range(len(tokens))])
    parts = torch.cat([o.features for o in outputs]).chunk(3, -1)
    values = [*parts, torch.cat([o.hidden for o in outputs])]
    if scramble is not None:
        order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(scramble))
        values = [v[order] for v in values]
    return {ref.canonical: Rows(keys=keys, values=v.float()) for ref, v in zip((*LAYERS, FINAL), values, strict=True)}


def _accepted_length(target, drafter, seed=99):
    """Tokens per decoding step of the engine, greedy, three drafted tokens. Short answers to many prompts: long greedy
    ones of random weights run into cycles of a few tokens, which even a draft that knows no context can guess."""
    decoder, generator = Decoder(target, _served(drafter, target)), torch.Generator().manual_seed(seed)
    tokens = passes = 0
    for _ in range(40):
        decoding = decoder.start(torch.randint(0, VOCAB, (4,), generator=generator).tolist(), max_tokens=9, num_draft=3)
        decoder.step(decoding)
        while decoding.remaining > 0:
            tokens += len(decoder.step(decoding))
            passes += 1
    return tokens / passes


def _by_frequency(target, seed=99):
    """What `_accepted_length` would be for the best draft that says the same token always."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for _ in range(40):
        decoder = Decoder(target)
        decoding = decoder.start(torch.randint(0, VOCAB, (4,), generator=generator).tolist(), max_tokens=9)
        while decoding.remaining > 0:
            decoder.step(decoding)
        answers.append(decoding.generated)
    best = 1.0
    for guess in range(VOCAB):
        tokens = passes = 0
        for answer in answers:
            at = 1  # the first pass reads the prompt
            while at < len(answer):
                run = 0
                while run < 3 and at + run < len(answer) - 1 and answer[at + run] == guess:
                    run += 1
                tokens, passes, at = tokens + run + 1, passes + 1, at + run + 1
        best = max(best, tokens / passes)
    return best


def _train(target, drafter, seed, scramble=None, steps=80):
    trainer = DrafterTrainer(
        drafter, embedding=_weights(target)[0], head=_weights(target)[1],
        config=DrafterTraining(lr=5e-3, steps=3, warmup=4, loss=Eagle3Loss(decay=0.8)),
    )  # fmt: skip
    history = []
    for step in range(steps):
        if step % 10 == 0:
            rollout = _rollout(target, 1000 * seed + step)
            supervised = {k: torch.arange(len(t)) >= 4 for k, t in rollout.items()}
            captured = _capture(target, rollout, None if scramble is None else scramble + step)
        history.append(trainer.step(captured, rollout, supervised))
    return history


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_training_raises_the_accepted_length_of_the_engine_and_scrambled_rows_do_not(seed):
    target = _target(seed)
    fresh = _accepted_length(target, _drafter(seed))
    drafter = _drafter(seed)
    history = _train(target, drafter, seed)
    trained = _accepted_length(target, drafter)
    scrambled = _drafter(seed)
    _train(target, scrambled, seed, scramble=7)
    wrong = _accepted_length(target, scrambled)
    frequent = _by_frequency(target)
    print(
        f"seed {seed}: accepted length {fresh:.2f}, trained {trained:.2f}, with scrambled rows {wrong:.2f}, for one "
        f"frequent token {frequent:.2f}"
    )
    assert trained >= fresh + 0.2
    # Scrambled rows still teach which tokens are frequent (greedy answers of random weights have such), but nothing
    # about which one comes next. Where none is frequent see examples/cotrain_eagle3.py.
    assert wrong <= frequent + 0.05
    assert history[-1]["eagle3_loss/step_0"] < history[0]["eagle3_loss/step_0"]
    assert history[-1]["eagle3_accept_length"] > history[0]["eagle3_accept_length"]


def test_a_saved_drafter_is_loaded_again_and_says_its_convention(tmp_path):
    drafter = _drafter(4)
    drafter.save(tmp_path)
    again = Eagle3Drafter.load(tmp_path)
    assert again.config.to_json() == drafter.config.to_json()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "layer_id_convention": "input_to"}
    outputs = dataclasses.replace(_config(), layers=tuple(LayerRef("output_of", i - 1) for i in IDS))
    assert outputs.to_json() == config
    del config["eagle_config"]["layer_id_convention"]
    with pytest.raises(SettingsError, match="whichever its layer ids follow"):
        Eagle3Config.from_json(config)


def test_embedding_and_head_are_replicas_and_every_step_publishes():
    target, drafter = _target(0), _drafter()
    embedding, head = (w.detach() for w in _weights(target))
    before = embedding.clone(), head.clone()
    published = []
    trainer = DrafterTrainer(
        drafter, embedding=embedding, head=head, config=DrafterTraining(steps=2, updates=2), publish=published.append
    )
    rollout = _rollout(target, 0, count=2, length=6)
    supervised = {k: torch.ones(len(t), dtype=torch.bool) for k, t in rollout.items()}
    captured = _capture(target, rollout)
    updates = []
    trainer.optimizer.register_step_post_hook(lambda *_: updates.append(len(published)))
    for _ in range(2):
        trainer.step(captured, rollout, supervised)
    assert updates == [0, 0, 1, 1]  # two updates, then a publish
    assert published == [drafter, drafter]
    assert torch.equal(embedding, before[0])
    assert torch.equal(head, before[1])
    assert trainer._embedding.data_ptr() != embedding.data_ptr()
    short = {ref: Rows(keys=r.keys[:-1], values=r.values[:-1]) for ref, r in captured.items()}
    with pytest.raises(CaptureError, match="every position in order"):
        DrafterTrainer(drafter, embedding=embedding, head=head).step(short, rollout, supervised)
    with pytest.raises(SettingsError, match="must be positive"):
        DrafterTraining(updates=0)


def _data_parallel(rank, world_size):
    import torch.distributed as dist

    target, drafter = _target(0), _drafter()
    rollout = _rollout(target, 5, count=5, length=8)
    mine = {k: t for k, t in rollout.items() if world_size == 1 or (k == 0) == (rank == 0)}
    trainer = DrafterTrainer(
        drafter, embedding=_weights(target)[0], head=_weights(target)[1], config=DrafterTraining(steps=2, lr=1e-2),
        group=dist.group.WORLD,
    )  # fmt: skip
    supervised = {k: torch.arange(len(t)) >= 4 for k, t in mine.items()}
    metrics = trainer.step(_capture(target, mine), mine, supervised)
    return metrics, {k: v.tolist() for k, v in drafter.state_dict().items() if "norm" in k}


@pytest.mark.multiproc
def test_uneven_data_parallel_ranks_take_the_step_of_one_process():
    ((one, weights),) = spawn_ranks(_data_parallel, 1, gloo=True)
    for metrics, own in spawn_ranks(_data_parallel, 2, gloo=True):
        assert metrics == pytest.approx(one, rel=1e-4)
        for name, values in own.items():
            assert values == pytest.approx(weights[name], abs=1e-4)
