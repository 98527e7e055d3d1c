"""Runners of an SGLang scheduler process on small modules: what is refused, and what is derived from weights.

The modules stand in for SGLang's models; worker classes bear the names of SGLang's, which the rows go by.
"""

from __future__ import annotations

import concurrent.futures
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync import errors
from weightsync.engine.routing import build_routes
from weightsync.engines.sglang.acceptance import Counters, acceptance_of
from weightsync.engines.sglang.bridge import Bridge
from weightsync.engines.sglang.rows import INTERNALS, internals_for
from weightsync.engines.sglang.runners import describe_speculation, find_runners, unsupported
from weightsync.manifest import TensorSpec
from weightsync.plan import build_manifest

ROW = internals_for("0.5.10.post1")
VOCAB, HIDDEN = 12, 4


class Model(torch.nn.Module):
    def __init__(self, rows: int = VOCAB, **config: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB, **config)
        self.lm_head = torch.nn.Linear(HIDDEN, rows, bias=False)

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            if name == "lm_head.weight":
                self.lm_head.weight.data.copy_(tensor)


class Eagle3(Model):
    hot_token_id: torch.Tensor | None = None


class EAGLEWorker:
    def __init__(self, model: torch.nn.Module, hot_token_id: torch.Tensor | None = None) -> None:
        self.draft_model_runner = SimpleNamespace(model=model, device="cpu")
        self.hot_token_id = hot_token_id


class NGRAMWorker:
    pass


class DFlashWorker:
    pass


def scheduler(worker: Any = None, target: Model | None = None, **args: Any) -> Any:
    runner = SimpleNamespace(model=target or Model(), device="cpu")
    values = {"model_path": "m", "speculative_draft_model_path": None, "speculative_algorithm": "EAGLE", **args}
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runner), draft_worker=worker, server_args=SimpleNamespace(**values)
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"pp_size": 2}, "rank s * tp_size + t"),
        ({"dp_size": 2}, "a server per replica"),
        ({"ep_size": 4}, "every tensor but other ranks' experts"),
        ({"enable_dp_attention": True, "dp_size": 2}, "group of tp_size / dp_size"),
        ({"load_format": "gguf"}, "load_format=gguf"),
        ({"quantization": "fp8"}, "quantization=fp8"),
        ({"enable_lora": True}, "LoRA"),
        ({"cpu_offload_gb": 1}, "offloaded"),
        ({"weight_cache_mode": "on"}, "weight_cache_mode"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode"),
    ],
)
def test_what_cannot_take_part_is_named(args: dict[str, Any], says: str) -> None:
    (problem,) = unsupported(scheduler(**args), ROW)
    assert says in problem


def test_what_can_take_part_has_no_problem() -> None:
    plain = {
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "load_format": "auto",
        "quantization": None,
        "offload_group_size": -1,
    }
    assert unsupported(scheduler(EAGLEWorker(Model()), **plain), ROW) == []


def test_a_worker_that_is_in_no_row_is_refused_by_name() -> None:
    for row in INTERNALS:
        (problem,) = unsupported(scheduler(DFlashWorker()), row)
        assert "DFlashWorker" in problem
    with pytest.raises(errors.UnsupportedError, match="DFlashWorker"):
        find_runners(scheduler(DFlashWorker()), ROW)


def test_a_worker_that_is_not_as_its_row_says_is_refused() -> None:
    worker = EAGLEWorker(Model())
    del worker.draft_model_runner
    with pytest.raises(errors.UnsupportedError, match="draft_model_runner"):
        find_runners(scheduler(worker), ROW)


def test_speculation_without_a_model_has_the_target_alone() -> None:
    assert [r.name for r in find_runners(scheduler(NGRAMWorker()), ROW)] == ["target"]
    assert [r.name for r in find_runners(scheduler(None), ROW)] == ["target"]


@pytest.mark.parametrize(
    ("args", "roles"),
    [
        ({}, ("draft", "target")),
        ({"speculative_draft_model_path": "m"}, ("draft", "target")),
        ({"speculative_draft_model_path": "d"}, ("draft",)),
        ({"speculative_draft_model_path": "m", "speculative_algorithm": "EAGLE3"}, ("draft",)),
    ],
)
def test_a_drafter_of_its_own_takes_nothing_of_the_target_by_name(args: dict[str, Any], roles: tuple[str, ...]) -> None:
    assert find_runners(scheduler(EAGLEWorker(Model()), **args), ROW)[1].roles == roles


def test_the_head_of_a_token_map_follows_the_targets_in_place() -> None:
    ids = torch.tensor([7, 2, 5])
    draft, target = Model(rows=3), Model()
    first, drafter = find_runners(scheduler(EAGLEWorker(draft, ids), target), ROW)
    assert drafter.frozen == ("lm_head.weight",)
    assert drafter.rename("target", "lm_head.weight") is None
    pointer = draft.lm_head.weight.data_ptr()
    first.begin()
    first.load([("lm_head.weight", torch.randn(VOCAB, HIDDEN))])
    first.finish()
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[ids])
    assert draft.lm_head.weight.data_ptr() == pointer


def eagle3(rows: int = 3) -> tuple[Any, EAGLEWorker, Eagle3]:
    model = Eagle3(rows=rows, draft_vocab_size=rows)
    model.hot_token_id = torch.arange(rows)
    worker = EAGLEWorker(model, model.hot_token_id.clone())
    return find_runners(scheduler(worker, speculative_algorithm="EAGLE3"), ROW)[1], worker, model


def publish_ids(runner: Any, d2t: list[int], marked: list[int]) -> None:
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[marked] = True
    runner.begin()
    runner.load([("d2t", torch.tensor(d2t)), ("t2d", t2d)])
    runner.finish()


def test_published_draft_vocabularies_reach_the_ids_in_use_in_place() -> None:
    runner, worker, model = eagle3()
    pointers = (worker.hot_token_id.data_ptr(), model.hot_token_id.data_ptr())
    publish_ids(runner, [1, 3, 6], [1, 4, 8])
    assert worker.hot_token_id.tolist() == model.hot_token_id.tolist() == [1, 4, 8]
    assert (worker.hot_token_id.data_ptr(), model.hot_token_id.data_ptr()) == pointers
    runner.begin()
    runner.finish()  # a publish without them leaves them
    assert worker.hot_token_id.tolist() == [1, 4, 8]


@pytest.mark.parametrize(
    ("d2t", "marked", "says"), [([1, 3, 99], [1, 4, 8], "outside"), ([1, 3, 6], [1, 4, 9], "do not agree")]
)
def test_draft_vocabularies_that_cannot_be_are_refused(d2t: list[int], marked: list[int], says: str) -> None:
    runner, worker, _ = eagle3()
    with pytest.raises(errors.RoutingError, match=says):
        publish_ids(runner, d2t, marked)
    assert worker.hot_token_id.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"speculative_algorithm": None}, None),
        ({"speculative_num_steps": 3}, "EAGLE (draft m, steps 3)"),
        ({"speculative_draft_model_path": "d", "speculative_algorithm": "EAGLE3"}, "EAGLE3 (draft d)"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}, "NGRAM (draft tokens 4)"),
    ],
)
def test_speculation_is_described_with_its_draft(args: dict[str, Any], said: str | None) -> None:
    assert describe_speculation(scheduler(**args)) == said


class Threaded(Model):
    """Loads in a pool of threads, as SGLang's DeepSeek does with host tensors."""

    def load_weights(self, pairs: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            futures = [pool.submit(Model.load_weights, self, [pair]) for pair in pairs]
            for f in concurrent.futures.as_completed(futures):
                f.result()


def test_a_dry_run_of_a_loader_with_threads_writes_nothing_and_sees_what_would_be_written() -> None:
    model, pool = Threaded(), concurrent.futures.ThreadPoolExecutor
    before = model.lm_head.weight.clone()
    (runner,) = find_runners(scheduler(None, model), ROW)
    spec = TensorSpec(role="target", name="lm_head.weight", dtype=torch.float32, shape=(VOCAB, HIDDEN))
    assert build_routes(build_manifest([[spec]], bucket_bytes=4096), [runner]).taken() == {"target": (0,)}
    assert torch.equal(model.lm_head.weight, before)
    assert concurrent.futures.ThreadPoolExecutor is pool
    runner.load([("lm_head.weight", torch.ones(VOCAB, HIDDEN))])
    assert torch.equal(model.lm_head.weight, torch.ones(VOCAB, HIDDEN))


class Request:
    """A tokenized request as the gate sees it: by the name of its type."""


TokenizedGenerateReqInput = type("TokenizedGenerateReqInput", (Request,), {})


def test_requests_are_kept_back_until_a_refused_flush_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    refusals, processed = [False, False, True], []
    s = scheduler(EAGLEWorker(Model()))
    s.tp_cpu_group, s.waiting_queue = None, []
    s.running_batch = s.last_batch = None
    s.flush_cache = lambda: refusals.pop(0)
    s.process_input_requests = processed.append
    bridge = Bridge(s, ROW)
    bridge._hold, bridge._mode, bridge._flush_due = True, "wait", True
    request = TokenizedGenerateReqInput()
    s.process_input_requests([request])
    s.process_input_requests([])
    assert processed == [[], []]
    s.process_input_requests([])
    assert processed[-1] == [request]
    assert refusals == []


class Counted:
    """What SGLang counts of a request, under the names of either release."""

    def __init__(self, accepted: str) -> None:
        self.spec_verify_ct, self.done, self._accepted = 0, False, accepted
        setattr(self, accepted, 0)

    def step(self, accepted: int) -> None:
        self.spec_verify_ct += 1
        setattr(self, self._accepted, getattr(self, self._accepted) + accepted)

    def finished(self) -> bool:
        return self.done


@pytest.mark.parametrize("name", ["spec_accepted_tokens", "spec_num_correct_drafts"])
def test_drafts_are_counted_by_requests_from_their_first_step_to_their_last(name: str) -> None:
    s = scheduler(EAGLEWorker(Model()), speculative_num_draft_tokens=4)
    first, second = Counted(name), Counted(name)
    s.running_batch, s.last_batch = SimpleNamespace(reqs=[first]), None
    counters = Counters(s)
    counters.sample()
    first.step(3)
    s.running_batch, s.last_batch = SimpleNamespace(reqs=[]), SimpleNamespace(reqs=[first, second])
    counters.sample()
    # The last step of a request is counted when it has left its batch already.
    first.step(1)
    first.done = True
    second.step(0)
    s.last_batch = None
    assert counters.counts() == {"drafts": 3.0, "draft_tokens": 9.0, "accepted_tokens": 4.0}
    first.step(9)
    assert counters.counts()["drafts"] == 3.0


def test_without_speculation_nothing_is_counted() -> None:
    assert Counters(scheduler(None)).counts() == {}
    assert acceptance_of([{"meta_info": {}}]) == {}
