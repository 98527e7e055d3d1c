"""verl's Megatron checkpoints through `checkpoint`: two ranks in verl's environment, see `verl_checkpoint`."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from checkpoint.errors import ConfigError, LoadError
from checkpoint.retention import Retention, doomed
from checkpoint.trainers.verl_folders import PARTS, RunFolders
from tests.support.ranks import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run(code: str, *args: str, deadline_s: float, where: str = "verl") -> str:
    """The last line that a program in an environment, verl's, printed."""
    python = ROOT / f".venv-{where}" / "bin" / "python"
    if not python.exists():
        pytest.fail(f"{python.relative_to(ROOT)} is missing: run `make {where}`")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "-c", code, *args], env=env, capture_output=True, text=True, timeout=deadline_s, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_save_and_resume_through_verl_and_verls_own_manager_reads_the_same(tmp_path: Path) -> None:
    code = "from tests.trainers.verl_checkpoint import main; main()"
    zero, one = json.loads(run(code, str(tmp_path), deadline_s=380))
    for rank in (zero, one):
        assert rank["class"] == "checkpoint.trainers.verl.CheckpointManager"
        assert rank["replaces"]
        # Bitwise: weights, optimizer, schedule and random numbers; here, by verl's own manager, and from its files.
        assert rank["compared"] > 40
        for what in ("differs", "differs in verl's own", "differs from verl's own", "differs in Hugging Face's format"):
            assert rank[what] == [], what
        assert "not in model_sharded_state_dict" in rank["verl's own, both at once"]
        assert len(rank["first weights"]) > 10
        assert all(rank["first weights"])
        assert rank["losses"][0] == rank["losses"][1]

        # The save of `last_step` was committed when it returned, the ones before came without a further call.
        assert rank["last"] == "4"
        state, error = rank["failed"]
        assert state == "failed"
        assert "rank 1" in error
        assert "SIGKILL" in error
        assert rank["tracker after a failed save"] == "4"
        assert rank["resumed from"] == "global_step_4"
        assert "never committed" in rank["uncommitted"]
        assert "[3, 4]" in rank["uncommitted"]
        assert "resume_from_path=" in rank["uncommitted"]

        hints = (
            "root='${trainer.default_local_dir}'",
            "durable_url",
            "newer ones, [4]",
            "durable_url",
            "neither of this",
        )
        for text, hint in zip(rank["refused paths"], hints, strict=True):
            assert text.startswith(("ConfigError", "LoadError"))
            assert hint in text
        hints = ("root is missing", "rooot", "deadline_s", "use_megatron_fsdp", "LoRA", "save_lora_only", "optimiser")
        for text, hint in zip(rank["refused"], hints, strict=True):
            assert text.startswith("ConfigError")
            assert hint in text

    # Retention takes verl's folders of removed steps with it; the dataloader's state is verl's.
    assert zero["folders"] == sorted(
        [f"global_step_{n}/data.pt" for n in (1, 2, 3, 4)] + [f"global_step_{n}/actor" for n in (3, 4)]
    )
    assert zero["tracker is the driver's"] == "4"
    assert zero["link"] == "../../../shards/actor/iter_0000004"
    manifest = zero["manifest"]
    assert manifest["saved_by"] == "checkpoint"
    assert sorted(manifest["contents"]) == ["lr_scheduler", "model", "optimizer", "rng_state", "transformer_config"]
    assert {"config.json", "model.safetensors"} <= set(zero["hf files"])
    assert zero["hf parts"] == ["extra/dist_ckpt", "optimizer/dist_ckpt"]


# As verl's server parses what it starts vLLM with.
PARSE = """
import json, sys
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
subparsers = parser.add_subparsers(required=False, dest="subparser")
for command in serve.cmd_init():
    command.subparser_init(subparsers)
args = parser.parse_args(["serve", "model", *sys.argv[1:]])
print(json.dumps([args.middleware, args.weight_transfer_config.backend]))
"""


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_verl_and_vllm_read_the_example_config_as_it_is_meant(tmp_path: Path) -> None:
    code = "from tests.trainers.verl_config import main; main()"
    found = json.loads(run(code, str(tmp_path / "model"), str(tmp_path / "run"), deadline_s=190))
    assert found["manager"] == "checkpoint.trainers.verl"  # imported by verl, since its config says so
    assert found["shards"] == found["async"] == [True, True]
    assert found["options"] == [{"root": str(tmp_path / "run"), "last_step": 1000, "deadline_s": 600}] * 2
    assert found["supervised"] == [True, {"root": str(tmp_path / "run")}]
    assert found["adapter"] == "weightsync.trainers.verl"
    assert found["server"] == [None, "vllm_server_3_0"]
    # verl starts its servers with what vLLM's own parser takes for our engine and our fence.
    parsed = json.loads(run(PARSE, *found["arguments"], deadline_s=190, where="vllm"))
    assert parsed == [["weightsync.engines.vllm.server.Fence"], "weightsync"]
    hints = (
        "free_cache_engine=True",
        "hybrid_engine=True",
        "'replica': list the servers",
        "[]: list the servers",
        "with each of `engines`",
        "rollout.name is none of",
        "VLLM_API_KEY is not set",
    )
    for text, hint in zip(found["refused"], hints, strict=True):
        assert text.startswith("ConfigError")
        assert hint in text


@pytest.fixture
def folders(tmp_path: Path) -> RunFolders:
    return RunFolders(root=tmp_path / "run", shards=tmp_path / "run" / "shards", role="actor")


def commit(folders: RunFolders, *steps: int, role: str = "actor", data: bool = True) -> None:
    for step in steps:
        path = folders.shards / role / f"iter_{step:07d}"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text("{}")
        place = folders.root / f"global_step_{step}" / role
        place.mkdir(parents=True, exist_ok=True)
        if data:
            (place.parent / "data.pt").write_bytes(b"")


def point(folders: RunFolders, step: object) -> None:
    (folders.root / "latest_checkpointed_iteration.txt").write_text(str(step))


def pointed(folders: RunFolders) -> str | None:
    path = folders.root / "latest_checkpointed_iteration.txt"
    return path.read_text() if path.exists() else None


@pytest.mark.parametrize(
    ("actor", "critic", "named", "found"),
    [
        ((10, 20), None, 20, "20"),
        ((10, 20), None, 30, "20"),  # named while the save was in flight
        ((10, 20), None, 10, "20"),  # ended between commit and tracker
        ((10, 20), None, "", "20"),  # torn
        ((10, 20), (10,), 20, "10"),  # one role committed, the other did not
        ((10, 20), (), 20, None),
        ((), None, 10, None),
        ((), None, None, None),
    ],
)
def test_the_tracker_names_the_newest_step_that_every_role_committed(
    folders: RunFolders, actor: tuple[int, ...], critic: tuple[int, ...] | None, named: object, found: str | None
) -> None:
    folders.own.mkdir(parents=True)
    commit(folders, *actor)
    if critic is not None:
        (folders.shards / "critic").mkdir()
        commit(folders, *critic, role="critic")
    if named is not None:
        point(folders, named)
    folders.settle()
    assert pointed(folders) == found
    assert folders.settle() == (None if found is None else int(found))


def test_the_tracker_moves_forward_with_the_dataloaders_state_only(folders: RunFolders) -> None:
    commit(folders, 10)
    commit(folders, 20, data=False)
    point(folders, 10)
    assert folders.settle() == 10


def test_steps_of_verls_own_manager_are_believed_and_never_written_over(folders: RunFolders) -> None:
    commit(folders, 10)
    theirs = folders.root / "global_step_20" / "actor"
    (theirs / "optimizer" / "dist_ckpt").mkdir(parents=True)
    (theirs / "optimizer" / "dist_ckpt" / ".metadata").write_bytes(b"")
    point(folders, 20)
    assert folders.settle() == 20
    assert folders.foreign(theirs)
    with pytest.raises(ConfigError, match="verl's own manager"):
        folders.check_foreign(theirs)
    # Its manifest tells, too, where everything is in Hugging Face's format.
    shutil.rmtree(theirs / "optimizer")
    (theirs / "ckpt_contents.json").write_text('{"framework": "megatron"}')
    assert folders.foreign(theirs)
    folders.publish(theirs, 20, PARTS, {"saved_by": "checkpoint"})
    assert not folders.foreign(theirs)


def test_a_run_that_was_moved_is_found_and_one_elsewhere_is_read_by_its_links(
    folders: RunFolders, tmp_path: Path
) -> None:
    commit(folders, 10)
    folders.publish(folders.root / "global_step_10" / "actor", 10, ("optimizer",), {"saved_by": "checkpoint"})
    moved = folders.root.rename(tmp_path / "moved")
    path = moved / "global_step_10" / "actor"
    assert (path / "optimizer" / "dist_ckpt" / "metadata.json").exists()
    assert folders.source(path) == moved / "shards" / "actor"
    assert folders.step_of(path) == 10
    for wrong in ("global_step_10/critic/x", "step_10", "global_step_x/actor"):
        with pytest.raises(ConfigError, match="global_step_"):
            folders.step_of(moved / wrong)
    with pytest.raises(LoadError, match="no committed checkpoint"):
        folders.source(tmp_path / "other" / "global_step_10" / "actor")


def test_supervised_training_has_no_folder_per_role_and_its_whole_step_goes(folders: RunFolders) -> None:
    for step in (10, 20):
        commit(folders, step)
        path = folders.root / f"global_step_{step}"
        shutil.rmtree(path)
        assert folders.step_of(path, step) == step
        folders.publish(path, step, PARTS, {"saved_by": "checkpoint"}, Retention(keep_last=1))
        (path / "data_0.pt").write_bytes(b"")
        assert (path / "model" / "dist_ckpt" / "metadata.json").exists()
    # Ten's shards are still there: a writer removes them after its word of the commit.
    assert sorted(p.name for p in folders.root.glob("global_step_*")) == ["global_step_20"]
    assert folders.settle() == 20


def test_the_tracker_moves_once_all_roles_have_the_step(folders: RunFolders) -> None:
    critic = dataclasses.replace(folders, role="critic")
    commit(folders, 10, 20)
    commit(critic, 10, role="critic")
    for role, step, named in ((folders, 10, "10"), (folders, 20, "10"), (critic, 10, "10")):
        role.move_tracker(step)
        assert pointed(folders) == named
    commit(critic, 20, role="critic")
    critic.move_tracker(20)
    assert pointed(folders) == "20"
    folders.move_tracker(10)
    assert pointed(folders) == "20"


def test_a_role_keeps_the_newest_step_that_the_others_have(folders: RunFolders) -> None:
    assert folders.retention(None, 5) == Retention()
    commit(folders, 10, 20, 30)
    assert folders.retention(1, 5) == Retention(keep_last=1, keep_every=5)
    commit(folders, 10, role="critic")  # whose later saves failed
    keep = folders.retention(1, None)
    commit(folders, 40)
    assert doomed(folders.own, keep) == []
    shutil.rmtree(folders.own / "iter_0000040")
    commit(folders, 20, 30, role="critic")
    keep = folders.retention(1, None)
    shutil.rmtree(folders.root / "global_step_40")
    commit(folders, 40)
    assert doomed(folders.own, keep) == [10, 20]


def test_folders_whose_shards_vanished_go_when_retention_would_have_taken_them(folders: RunFolders) -> None:
    def publish(step: int, retention: Retention | None = None) -> None:
        commit(folders, step)
        folders.publish(
            folders.root / f"global_step_{step}" / "actor", step, PARTS, {"saved_by": "checkpoint"}, retention
        )

    for step in (10, 20, 30):
        publish(step)
    for lost in (10, 20):
        shutil.rmtree(folders.own / f"iter_{lost:07d}")

    def held() -> list[str]:
        return sorted(p.parent.name for p in folders.root.glob("global_step_*/actor"))

    publish(40)
    assert held() == [f"global_step_{n}" for n in (10, 20, 30, 40)]
    publish(50, Retention(keep_last=4))
    assert held() == [f"global_step_{n}" for n in (20, 30, 40, 50)]
    # Of another run whose shards are gone, what is said is what is missing.
    other = dataclasses.replace(
        folders, root=folders.root.parent / "other", shards=folders.root.parent / "other/shards"
    )
    folders.shards.rename(folders.shards.with_name("moved"))
    with pytest.raises(LoadError, match="no committed checkpoint"):
        other.source(folders.root / "global_step_50" / "actor")
