"""The model computes what Transformers computes, on one rank and on two, and its drafts what plain formulas say."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from weightsync.embedded.config import SHAPES, ModelConfig, eagle3_config, resolve_config
from weightsync.embedded.drafts import Eagle3Draft, MtpDraft, aux_layers
from weightsync.embedded.known import known_argmax, known_next, write_hf_folder
from weightsync.embedded.loading import checkpoint_shapes, init_random, load_folder
from weightsync.embedded.model import Target
from weightsync.embedded.parallel import SINGLE, TpGroup
from weightsync.errors import ConfigError, EngineError

TOKENS = torch.tensor([5, 17, 300, 2, 5, 480, 61, 508, 0, 33])
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def random_checkpoint(config, seed=0, dtype=torch.float32):
    """role -> name -> tensor; large enough that attention and biases matter."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for role, shapes in checkpoint_shapes(config).items():
        out[role] = {}
        for name, shape in shapes.items():
            tensor = torch.randn(shape, generator=g) * 0.15
            if name.endswith("norm.weight"):
                tensor += 1
            out[role][name] = tensor.to(dtype)
    if config.is_eagle3:
        rows = config.draft_vocab_size
        ids = torch.randperm(config.vocab_size, generator=g)[:rows].sort().values
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[ids] = True
        out["draft"] |= {"d2t": ids - torch.arange(rows), "t2d": mask}
    return out


def on_ranks(size, work):
    """`work(tp)` on `size` ranks that are threads of this process; returns rank 0's result."""
    if size == 1:
        return work(SINGLE)
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:

        def rank_main(rank):
            return work(TpGroup.connect(store, rank, size, timeout_s=30))

        return next(iter(list(pool.map(rank_main, range(size)))))


def logits_of(config, weights, tokens, tp=SINGLE, dtype=torch.float32):
    target = Target(config, tp, dtype=dtype)
    assert target.load_weights(weights.items()) == set(weights)
    return target.logits(target.forward(tokens, target.new_cache()).hidden)


CASES = {
    "llama": dataclasses.replace(SHAPES["tiny-llama"], num_kv_heads=1),
    "llama3-rope": ModelConfig.from_hf({**SHAPES["tiny-llama"].to_hf(), "rope_parameters": LLAMA3_ROPE}),
    "qwen2": dataclasses.replace(SHAPES["tiny-qwen2"], rope_theta=1e6),
    "qwen3": SHAPES["tiny-qwen3"],
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers_on_one_and_two_ranks(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = CASES[name]
    weights = random_checkpoint(config)["target"]
    write_hf_folder(tmp_path, config, weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs(TOKENS[None]).logits[0]
    for size in (1, 2):
        got = on_ranks(size, lambda tp: logits_of(config, weights, TOKENS, tp))
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen2"])
def test_a_cache_filled_in_pieces_gives_what_one_pass_gives(name):
    config = dataclasses.replace(SHAPES[name], num_mtp_layers=0)
    target = Target(config, dtype=torch.float32)
    target.load_weights(random_checkpoint(config)["target"].items())
    whole = target.logits(target.forward(TOKENS, target.new_cache()).hidden)
    cache = target.new_cache()
    pieces = [target.logits(target.forward(part, cache).hidden) for part in TOKENS.split([4, 1, 3, 2])]
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-5, rtol=1e-5)
    fork = cache.copy_prefix(4)
    cache.truncate(0)
    again = target.logits(target.forward(TOKENS[4:], fork).hidden)
    torch.testing.assert_close(again, whole[4:], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="no prefix of 5"):
        cache.copy_prefix(5)


def norm64(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def attention64(config, w, prefix, x):
    """Plain causal attention in fp64, one head after the other."""
    n, dim = x.shape[0], config.head_dim
    angles = torch.arange(n).double()[:, None] / config.rope_theta ** (torch.arange(0, dim, 2).double() / dim)

    def project(name, heads, rotate):
        y = x @ w[f"{prefix}.self_attn.{name}_proj.weight"].T
        if config.qkv_bias:
            y = y + w[f"{prefix}.self_attn.{name}_proj.bias"]
        y = y.view(n, heads, dim)
        if rotate:
            even = torch.view_as_complex(torch.stack((y[..., : dim // 2], y[..., dim // 2 :]), -1).contiguous())
            turned = torch.view_as_real(even * torch.polar(torch.ones_like(angles), angles)[:, None])
            y = torch.cat((turned[..., 0], turned[..., 1]), -1)
        return y

    q = project("q", config.num_heads, True)
    k = project("k", config.num_kv_heads, True)
    v = project("v", config.num_kv_heads, False)
    heads = []
    for h in range(config.num_heads):
        shared = h * config.num_kv_heads // config.num_heads
        scores = q[:, h] @ k[:, shared].T / dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(heads, -1) @ w[f"{prefix}.self_attn.o_proj.weight"].T


def mlp64(w, prefix, x):
    gate = x @ w[f"{prefix}.mlp.gate_proj.weight"].T
    return (gate * gate.sigmoid() * (x @ w[f"{prefix}.mlp.up_proj.weight"].T)) @ w[f"{prefix}.mlp.down_proj.weight"].T


@pytest.mark.parametrize("size", [1, 2])
def test_mtp_logits_follow_the_formula(size):
    config = SHAPES["tiny"]
    weights = random_checkpoint(config)
    everything = weights["target"] | weights["draft"]

    def work(tp):
        target = Target(config, tp, dtype=torch.float32)
        draft = MtpDraft(target)
        target.load_weights(everything.items())
        assert draft.load_weights(everything.items()) >= set(weights["draft"])
        out = target.forward(TOKENS[:-1], target.new_cache())
        hidden, chained = draft.forward(TOKENS[1:], draft.prepare(out.features), draft.new_cache())
        assert hidden is chained
        return out.hidden, draft.logits(hidden)

    states, got = on_ranks(size, work)
    w = {k: v.double() for k, v in everything.items()}
    eps, p = config.rms_norm_eps, "model.mtp_layers.0"
    embeds = w["model.embed_tokens.weight"][TOKENS[1:]]
    x = torch.cat(
        (
            norm64(states.double(), w[f"{p}.hidden_layernorm.weight"], eps),
            norm64(embeds, w[f"{p}.token_layernorm.weight"], eps),
        ),
        -1,
    )
    x = x @ w[f"{p}.input_proj.weight"].T
    x = x + attention64(config, w, p, norm64(x, w[f"{p}.input_layernorm.weight"], eps))
    x = x + mlp64(w, p, norm64(x, w[f"{p}.post_attention_layernorm.weight"], eps))
    expected = norm64(x, w[f"{p}.final_layernorm.weight"], eps) @ w["lm_head.weight"].T
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_eagle3_logits_follow_the_formula(size):
    config = dataclasses.replace(SHAPES["tiny-llama"], num_layers=5)
    draft_config = eagle3_config(config, draft_vocab_size=101)
    weights, drafter = random_checkpoint(config)["target"], random_checkpoint(draft_config, seed=1)["draft"]

    def work(tp):
        layers = aux_layers(draft_config, config.num_layers)
        target = Target(config, tp, dtype=torch.float32, capture=layers)
        draft = Eagle3Draft(draft_config, target)
        target.load_weights(weights.items())
        assert draft.load_weights(drafter.items()) == set(drafter)
        draft.refresh_derived()
        out = target.forward(TOKENS[:-1], target.new_cache())
        hidden, chained = draft.forward(TOKENS[1:], draft.prepare(out.features), draft.new_cache())
        ids = draft.to_target(draft.logits(hidden).argmax(-1))
        return out.features, draft.logits(hidden), chained, ids

    features, got, chained, ids = on_ranks(size, work)
    assert features.shape == (len(TOKENS) - 1, 3 * config.hidden_size)
    w = {k: v.double() for k, v in drafter.items()}
    eps = config.rms_norm_eps
    embeds = weights["model.embed_tokens.weight"].double()[TOKENS[1:]]
    hidden = features.double() @ w["fc.weight"].T
    x = torch.cat(
        (
            norm64(embeds, w["midlayer.input_layernorm.weight"], eps),
            norm64(hidden, w["midlayer.hidden_norm.weight"], eps),
        ),
        -1,
    )
    x = hidden + attention64(draft_config, w, "midlayer", x)
    x = x + mlp64(w, "midlayer", norm64(x, w["midlayer.post_attention_layernorm.weight"], eps))
    torch.testing.assert_close(chained.double(), x, atol=2e-5, rtol=1e-5)
    expected = norm64(x, w["norm.weight"], eps) @ w["lm_head.weight"].T
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=1e-5)
    best = expected.argmax(-1)
    assert ids.tolist() == (best + drafter["d2t"][best]).tolist()
    assert bool(drafter["t2d"][ids].all())


def test_eagle3_captures_the_inputs_of_its_layers_in_order():
    config = dataclasses.replace(SHAPES["tiny-llama"], num_layers=6)
    target = Target(config, dtype=torch.float32, capture=aux_layers(eagle3_config(config), 6))
    target.load_weights(random_checkpoint(config)["target"].items())
    states = []
    for layer in target.model.layers:
        layer.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    out = target.forward(TOKENS, target.new_cache())
    assert torch.equal(out.features, torch.cat((states[2], states[3], states[3]), -1))


def test_a_mtp_head_shares_embedding_and_output_layer_with_its_target():
    config = SHAPES["tiny"]
    target = Target(config)
    draft = MtpDraft(target)
    assert draft.model.embed_tokens.weight is target.model.embed_tokens.weight
    assert draft.lm_head.weight is target.lm_head.weight
    tied = Target(dataclasses.replace(config, tie_word_embeddings=True))
    assert MtpDraft(tied).lm_head.weight is tied.model.embed_tokens.weight
    eagle = eagle3_config(config)
    assert Eagle3Draft(eagle, target).model.embed_tokens.weight is target.model.embed_tokens.weight
    assert Eagle3Draft(eagle, target, own_embedding=True).model.embed_tokens is not target.model.embed_tokens


def test_loaders_write_in_place_whatever_order_names_come_in():
    config = SHAPES["tiny"]
    weights = random_checkpoint(config)
    one, other = Target(config, dtype=torch.float32), Target(config, dtype=torch.float32)
    pointers = {n: p.data_ptr() for n, p in one.named_parameters()}
    one.load_weights(weights["target"].items())
    for name in reversed(list(weights["target"])):
        other.load_weights([(name, weights["target"][name])])
    assert {n: p.data_ptr() for n, p in one.named_parameters()} == pointers
    for (n, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), n


def test_unknown_and_misshapen_names_are_refused_by_the_target_and_passed_over_by_a_draft():
    config = SHAPES["tiny"]
    target = Target(config)
    draft = MtpDraft(target)
    row = torch.zeros(config.hidden_size)
    with pytest.raises(KeyError, match=r"no parameter for 'model\.layers\.0\.nothing"):
        target.load_weights([("model.layers.0.nothing.weight", row)])
    assert target.load_weights([("model.mtp_layers.0.final_layernorm.weight", row)]) == set()
    assert draft.load_weights([("model.layers.0.input_layernorm.weight", row)]) == set()
    with pytest.raises(ValueError, match=r"q_proj\.weight: loaded tensor has shape \(64,\), expected \(64, 64\)"):
        target.load_weights([("model.layers.0.self_attn.q_proj.weight", row)])
    with pytest.raises(ValueError, match=r"embed_tokens\.weight: .* expected \(509, 64\)"):
        target.load_weights([("model.embed_tokens.weight", torch.zeros(512, 64))])


def test_an_eagle3_loader_takes_both_dialects_and_would_take_the_targets_layer():
    config = SHAPES["tiny-llama"]
    draft = Eagle3Draft(eagle3_config(config), Target(config))
    row = torch.rand(config.hidden_size)
    for name in ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight", "model.layers.0.hidden_norm.weight"):
        draft.model.midlayer.hidden_norm.weight.zero_()
        assert draft.load_weights([(name, row)]) == {name}
        assert torch.equal(draft.model.midlayer.hidden_norm.weight.float(), row.bfloat16().float())
    assert draft.load_weights([("model.layers.0.mlp.down_proj.weight", torch.zeros(64, 128))])


def test_a_wrong_vocabulary_map_is_found_when_derived_state_is_refreshed():
    config = SHAPES["tiny-llama"]
    draft_config = eagle3_config(config, draft_vocab_size=50)
    draft = Eagle3Draft(draft_config, Target(config))
    weights = random_checkpoint(draft_config)["draft"]
    draft.load_weights(weights.items())
    pointer = draft.hot_token_id.data_ptr()
    draft.refresh_derived()
    assert draft.hot_token_id.data_ptr() == pointer
    assert draft.hot_token_id.tolist() == (weights["d2t"] + torch.arange(50)).tolist()
    draft.load_weights([("t2d", ~weights["t2d"])])
    with pytest.raises(ValueError, match="do not agree"):
        draft.refresh_derived()
    draft.load_weights([("d2t", torch.full((50,), 509))])
    with pytest.raises(ValueError, match="outside the target's vocabulary of 509"):
        draft.refresh_derived()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_known_weights_generate_the_known_function(size, dtype):
    for name, draft in (("tiny", "mtp"), ("tiny-qwen2", None), ("tiny-qwen2", "eagle3"), ("tiny-qwen3", "eagle3")):
        config = SHAPES[name]
        weights = known_argmax(config, seed=3, draft=draft, dtype=dtype)["target"]
        everything = torch.arange(config.vocab_size)
        got = on_ranks(size, lambda tp, c=config, w=weights, t=everything: logits_of(c, w, t, tp, dtype).argmax(-1))
        assert torch.equal(got, known_next(config, seed=3, draft=draft)), (name, draft)
    assert not torch.equal(known_next(config, seed=3, draft="eagle3"), known_next(config, seed=4, draft="eagle3"))


def test_a_folder_loads_complete_or_not_at_all(tmp_path):
    config = SHAPES["tiny"]
    weights = random_checkpoint(config)
    everything = weights["target"] | weights["draft"]
    write_hf_folder(tmp_path / "one", config, everything)
    write_hf_folder(tmp_path / "many", config, everything, shard_bytes=100_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert resolve_config(tmp_path / "many") == config
    loaded = []
    for folder in ("one", "many"):
        target = Target(config, dtype=torch.float32)
        draft = MtpDraft(target)
        load_folder(tmp_path / folder, {"target": target, "draft": draft}, weights)
        loaded.append({**dict(target.named_parameters()), **dict(draft.named_parameters())})
    assert all(torch.equal(loaded[0][n], loaded[1][n]) for n in loaded[0])
    lacking = {n: t for n, t in everything.items() if "layers.1.self_attn.k_proj.bias" not in n}
    write_hf_folder(tmp_path / "lacking", config, lacking)
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of the target.*k_proj\.bias"):
        load_folder(tmp_path / "lacking", {"target": Target(config)}, {"target": weights["target"]})
    next((tmp_path / "many").glob("model-00002*")).unlink()
    with pytest.raises(ConfigError, match="names model-00002-of"):
        load_folder(tmp_path / "many", {"target": Target(config)}, {})


def test_configs_that_would_be_computed_wrongly_are_refused():
    base = SHAPES["tiny-llama"].to_hf()
    for change, words in (
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "RoPE type 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_nextn_predict_layers": 2}, "2 MTP layers"),
        ({"num_key_value_heads": 3}, "multiple of 3 KV heads"),
    ):
        with pytest.raises(ConfigError, match=words):
            ModelConfig.from_hf({**base, **change})
    with pytest.raises(ConfigError, match="lacks 'hidden_size'"):
        ModelConfig.from_hf({k: v for k, v in base.items() if k != "hidden_size"})
    with pytest.raises(ConfigError, match="neither a shape"):
        resolve_config("no-such-thing")
    for config in (*SHAPES.values(), eagle3_config(SHAPES["tiny"])):
        assert ModelConfig.from_hf(config.to_hf()) == config


def test_random_weights_are_the_same_on_every_rank_where_replicated():
    models = []
    for rank in (0, 1):
        model = Target(SHAPES["tiny-llama"], dtype=torch.float32)
        init_random(model, seed=1, rank=rank)
        models.append(model.state_dict())
    assert torch.equal(models[0]["model.norm.weight"], models[1]["model.norm.weight"])
    assert not torch.equal(models[0]["lm_head.weight"], models[1]["lm_head.weight"])


def test_a_lost_rank_is_an_error_on_the_others():
    store = dist.HashStore()
    left = threading.Event()

    def leave():
        tp = TpGroup.connect(store, 1, 2, timeout_s=1)
        tp.all_reduce(torch.ones(3))
        left.wait(20)

    thread = threading.Thread(target=leave)
    thread.start()
    with contextlib.ExitStack() as stack:
        stack.callback(thread.join, 20)
        stack.callback(left.set)
        tp = TpGroup.connect(store, 0, 2, timeout_s=1)
        assert tp.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        with pytest.raises(EngineError, match="all-gather failed on rank 0 of 2"):
            tp.all_gather(torch.ones(3))
