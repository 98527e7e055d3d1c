"""slime's and AReaL's adapters, held to the interfaces that were read at a named commit.

The trainers cannot be installed here. `stand_ins/` has files under their names whose signatures and calls are those of
`examples/interfaces/*.json`, which is tested; behind the adapters are real publisher, checkpoints and Megatron-Core.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess

import pytest
import torch

from examples import check_hooks
from tests.examples.hook_ranks import HF_CONFIG, STAND_INS, adapters, write_config
from tests.examples.lines import lines, run
from tests.support.ranks import spawn_ranks
from tests.test_structure import ROOT
from weightsync.embedded.build import build_models, make_runners, plan_models
from weightsync.embedded.engine import EngineConfig, launch
from weightsync.embedded.parallel import TpGroup
from weightsync.embedded.rank import _describe

AREAL, SLIME = lines("examples.check_hooks")


def commit_all(checkout):
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@y", "-C", str(checkout))
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_models_published_and_saved_through_the_hooks_are_the_trainers(tmp_path, monkeypatch):
    write_config(tmp_path)
    key = "k" * 20
    monkeypatch.setenv("TEST_KEY", key)
    with launch(EngineConfig(model=HF_CONFIG, draft="mtp", dtype="float32", api_key=key)) as engine:
        results = spawn_ranks(adapters, 2, args=(engine.url, str(tmp_path)), gloo=True, deadline_s=240)
        assert engine.status()["versions"] == {"target": 8, "draft[0]": 8}
        (held,) = engine.weights()
    assert digests(held) == digests(loaded(tmp_path / "hf"))
    for slime, areal in ((r["slime"], r["areal"]) for r in results):
        assert slime["first"] == 1
        assert "colocate" in slime["refused"]
        assert slime["versions"] == [1, 2, 3]
        assert slime["committed"].strip() == "4"
        assert slime["loaded"]
        assert slime["common"] == (3, 3.0, False, str(tmp_path / "slime"))
        assert slime["scheduler"] == 1e-2
        assert slime["metadata"]
        assert "'disk'" in areal["refused"]
        assert areal["version"] == 7
        assert areal["committed"].strip() == "7"
        assert areal["changed"]
        assert areal["loaded"]
        assert "other is another folder" in areal["elsewhere"]
        assert "save_checkpoint" in areal["own_format"]
        assert not areal["wrote"]
    assert results[0]["slime"]["engines"] == [1, 1, 1]


def loaded(folder):
    """What an engine that was started from the exported model holds, built in this process."""
    plan = plan_models(folder, "mtp", "float32", 1)
    decoder = build_models(plan, TpGroup(), device=torch.device("cpu"), seed=0)
    return {runner.name: _describe(runner.module) for runner in make_runners(decoder)}


def digests(runners):
    return {(runner, name): p["digest"] for runner, ps in runners.items() for name, p in ps.items()}


@pytest.mark.parametrize(("trainer", "line"), [("slime", SLIME), ("areal", AREAL)])
def test_a_pages_line_looks_into_a_checkout(trainer, line, tmp_path):
    """The stand-ins in the place of the clone: some facts are there, those of files that they lack are not."""
    checkout = tmp_path / line.rpartition(" ")[2]
    shutil.copytree(STAND_INS, checkout)
    commit_all(checkout)
    done = run(line, tmp_path, timeout=100)
    assert done.returncode == 1, done.stderr
    total = len(check_hooks.recorded(trainer)["facts"])
    match = re.search(rf"^{trainer} at \w+: (\d+) of {total} facts as at", done.stdout, re.MULTILINE)
    assert 10 <= int(match[1]) < total


# -- what was read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", check_hooks.TRAINERS)
def test_the_stand_ins_have_the_recorded_interface(trainer):
    facts = check_hooks.recorded(trainer)["facts"]
    held = 0
    for fact, value in facts.items():
        kind, file, _ = fact.split(" ", 2)
        path = STAND_INS / file
        if kind in ("signature", "calls", "field") and path.exists():
            found = check_hooks.derive(fact, path.read_text())
            if found is not None and found != []:
                assert set(found) <= set(value) if kind == "calls" else found == value, fact
                held += 1
    assert held >= 12


@pytest.mark.parametrize(("trainer", "prefix"), [("slime", "MegatronTrainRayActor"), ("areal", "MegatronEngine")])
def test_the_adapters_take_what_the_trainers_pass(trainer, prefix):
    own = (ROOT / "examples" / f"{trainer}_hooks.py").read_text()
    taken = 0
    for fact, value in check_hooks.recorded(trainer)["facts"].items():
        kind, _, name = fact.split(" ", 2)
        owner, _, method = name.rpartition(".")
        ours = {prefix: "WeightSyncActor", "UpdateWeightFromDistributed": "WeightUpdater"}.get(owner)
        if kind == "signature" and ours is not None:
            found = check_hooks.derive(f"signature x {ours}.{method}", own)
            if found is not None:
                assert parameters(found) == parameters(value), fact
                taken += 1
    assert taken >= 5


def parameters(arguments):
    """Names and defaults, without annotations."""
    scope: dict[str, object] = {}
    exec(f"from __future__ import annotations\ndef f({arguments}): ...", scope)
    return [(p.name, p.kind, p.default) for p in inspect.signature(scope["f"]).parameters.values()]


def test_what_a_page_says_was_read_is_what_is_recorded():
    pages = {"slime": "docs/guides/slime.md", "areal": "docs/guides/areal.md"}
    readme = (ROOT / "README.md").read_text()
    for trainer, page in pages.items():
        commit = check_hooks.recorded(trainer)["commit"]
        assert commit in (ROOT / page).read_text()
        assert re.search(rf"source-checked at `{commit[:8]}`, not run", readme), trainer


def test_a_hook_that_has_moved_is_found(tmp_path, monkeypatch, capsys):
    interfaces = tmp_path / "interfaces"
    interfaces.mkdir()
    facts = {"signature a.py A.b": "self, x: int=1", "calls a.py A.b > f": ["f(x)"], "option a.py --n": "type=int"}
    record = {"repository": "", "commit": "", "date": "", "facts": facts}
    (interfaces / "slime.json").write_text(json.dumps(record))
    monkeypatch.setattr(check_hooks, "FOLDER", interfaces)
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    source = "class A:\n    def b(self, x: int = 1):\n        f(x)\n        p.add_argument('--n', type=int, help='')\n"

    def commit(text):
        (checkout / "a.py").write_text(text)
        commit_all(checkout)

    commit(source)
    assert check_hooks.main(["slime", str(checkout)]) == 0
    commit(source.replace("x: int = 1", "y: int = 1").replace("f(x)", "f(y, 2)"))
    capsys.readouterr()
    assert check_hooks.main(["slime", str(checkout)]) == 1
    assert "self, y: int=1" in (shown := capsys.readouterr().out)
    assert "1 of 3 facts" in shown
    assert check_hooks.main(["slime", str(checkout), "--commit", "HEAD~1"]) == 0
    assert check_hooks.main(["slime", str(checkout), "--record"]) == 0
    assert check_hooks.main(["slime", str(checkout)]) == 0
    commit("")
    assert check_hooks.main(["slime", str(checkout), "--record"]) == 1
    assert check_hooks.main(["slime", str(tmp_path / "none")]) == 2
