"""Rules of the whole tree that no single package can hold: who imports whom, public names, errors, sizes, paths."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("checkpoint", "converters", "training_hooks", "weightsync")

# Package -> the packages of ours that it may import.
MAY_IMPORT = {
    "checkpoint": set(),
    "converters": {"checkpoint"},
    "training_hooks": set(),
    "weightsync": {"converters"},
}

# Trainers, engines and what else an environment may lack -> the modules (or folders) that adapt them.
ADAPTERS = {
    "fsspec": ("checkpoint/durable.py",),
    "matplotlib": ("weightsync/bench/",),
    "mbridge": (),
    "megatron": (
        "checkpoint/megatron/",
        "converters/live/",
        "converters/semantic/",
        "training_hooks/megatron/",
        "weightsync/bench/megatron/",
        "weightsync/sources/megatron.py",
    ),
    "ray": ("weightsync/actors/", "weightsync/trainers/verl.py"),
    "sglang": ("weightsync/engines/sglang/",),
    "tensorstore": ("checkpoint/legacy_zarr.py",),
    "transformers": ("converters/semantic/",),
    "upath": ("converters/offline/remote.py",),
    "verl": ("checkpoint/trainers/verl.py", "weightsync/trainers/verl.py"),
    "vllm": ("weightsync/engines/vllm/",),
}
# Adapters that are all about one package and are themselves imported lazily: there it may stand at the top.
EAGER = {
    "verl": ("checkpoint/trainers/verl.py", "weightsync/trainers/verl.py"),
    "megatron": ("converters/semantic/layers.py", "converters/semantic/spec.py"),
    "vllm": tuple(f"weightsync/engines/vllm/{name}.py" for name in ("engine", "reload", "shadow", "worker")),
}

# Exceptions that users need not tell apart: caught in their package, or a kind of what `errors.py` has.
INTERNAL_ERRORS = {"weightsync/acks.py": {"StepFailed"}, "weightsync/embedded/links.py": {"RankLost"}}

MAX_PUBLIC_NAMES = 15
LONG, TOO_LONG = 500, 800


def tracked(*patterns):
    out = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, check=True, text=True)
    return [ROOT / name for name in out.stdout.split("\0") if name and (ROOT / name).exists()]


def package_modules():
    return [p for p in tracked("*.py") if p.relative_to(ROOT).parts[0] in PACKAGES]


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(path):
    """(imported module, at import time of the module) of every import; TYPE_CHECKING blocks count as lazy."""
    found = []

    def visit(node, eager):
        if isinstance(node, ast.Import):
            found.extend((alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", eager))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, False)
            for child in node.orelse:
                visit(child, eager)
            return
        lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, eager and not lazy)

    visit(parsed(path), True)
    return found


def test_packages_import_each_other_in_one_direction_only():
    wrong = []
    for path in package_modules():
        own = path.relative_to(ROOT).parts[0]
        for name, _ in imports(path):
            top = name.split(".")[0]
            forbidden = top in PACKAGES and top != own and top not in MAY_IMPORT[own]
            if forbidden or top in ("tests", "benchmarks", "examples"):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_third_parties_are_imported_lazily_and_only_where_they_are_adapted():
    wrong = []
    for path in package_modules():
        name = str(path.relative_to(ROOT))
        for module, eager in imports(path):
            top = module.split(".")[0]
            if top not in ADAPTERS:
                continue
            if not name.startswith(ADAPTERS[top]):
                wrong.append(f"{name} imports {module}, but does not adapt {top}")
            elif eager and not name.startswith(EAGER.get(top, ())):
                wrong.append(f"{name} imports {module} at its top")
    assert wrong == []


def test_imports_are_found_where_they_stand(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(
        "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n"
        "try:\n    import e\nexcept ImportError:\n    pass\ndef f():\n    from g import h\nclass C:\n    import i\n"
    )
    assert imports(path) == [
        ("a.b", True), ("typing", True), ("c", False), ("d", True), ("e", True), ("g", False), ("i", True),
    ]  # fmt: skip


def _module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _importable_modules():
    """Modules that need only required dependencies, and are no programs."""
    eager = tuple(folder for folders in EAGER.values() for folder in folders)
    return [
        _module_name(p)
        for p in package_modules()
        if not str(p.relative_to(ROOT)).startswith(eager) and p.name != "__main__.py"
    ]


# Prints what importing the modules given as arguments changed in the process.
SIDE_EFFECTS = """
import importlib, json, logging, os, signal, sys, threading, warnings
import numpy, safetensors.torch, torch, torch.distributed

def state():
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "log handlers": [str(h) for h in logging.root.handlers],
        "log level": logging.root.level,
        "signal handlers": {str(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "threads": sorted(t.name for t in threading.enumerate()),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "warning filters": len(warnings.filters),
    }

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
changed = [k for k in before if before[k] != after[k]]
print(json.dumps({"changed": changed, "modules": sorted({m.split(".")[0] for m in sys.modules})}))
"""


@pytest.mark.multiproc
def test_importing_has_no_side_effects_and_needs_no_engine_or_trainer():
    modules = _importable_modules()
    assert {"weightsync", "weightsync.engine.base", "checkpoint", "training_hooks"} <= set(modules)
    done = subprocess.run(
        [sys.executable, "-c", SIDE_EFFECTS, *modules], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["changed"] == []
    assert set(seen["modules"]) & set(ADAPTERS) == set()


def _all_order(name):
    """The order of ruff's RUF022: CONSTANTS, then Classes, then the rest."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


@pytest.mark.parametrize("name", _importable_modules())
def test_public_names_are_few_sorted_and_there(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        public = [n for n, v in vars(module).items() if not n.startswith("_") and _defined_in(v, name)]
        assert public == [], f"{name} defines {public}, but has no __all__"
        return
    assert names == sorted(names, key=_all_order)
    assert [n for n in names if not hasattr(module, n)] == []
    assert len(names) <= MAX_PUBLIC_NAMES


def _defined_in(value, module):
    return isinstance(value, (type, types.FunctionType)) and value.__module__ == module


@pytest.mark.parametrize("package", [p for p in PACKAGES if (ROOT / p / "errors.py").exists()])
def test_errors_have_one_root_and_are_drawn_at_the_top(package):
    module = importlib.import_module(f"{package}.errors")
    classes = {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    roots = [n for n, c in classes.items() if not any(b.__name__ in classes for b in c.__bases__)]
    assert len(roots) == 1, f"{package} has the error roots {roots}"
    assert sorted(module.__all__) == sorted(classes)

    # A drawn line is `    ├── Name (Builtin)   text`, perhaps in columns; where the name stands gives its depth.
    drawn, path = {}, {}
    for line in module.__doc__.splitlines():
        if match := re.match(r"^ {4}((?:[│ ] {3})*[├└]── |)(\w+)(?: +\((\w+)\))?(?=  | [a-z]|$)", line):
            depth = len(match[1]) // 4
            path[depth] = match[2]
            drawn[match[2]] = {n for n in (path.get(depth - 1, "Exception"), match[3]) if n}
    assert drawn == {n: {b.__name__ for b in c.__bases__} for n, c in classes.items()}


def test_errors_are_defined_in_errors_modules_only():
    known = {"BaseException", "Exception", "OSError", "RuntimeError", "ValueError"}
    for package in PACKAGES:
        if (ROOT / package / "errors.py").exists():
            known |= set(importlib.import_module(f"{package}.errors").__all__)
    wrong = []
    for path in package_modules():
        if path.name == "errors.py":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                if node.name in INTERNAL_ERRORS.get(str(path.relative_to(ROOT)), ()):
                    continue
                bases = {ast.unparse(b).split(".")[-1] for b in node.bases}
                if bases & known:
                    wrong.append(f"{path.relative_to(ROOT)} defines {node.name}")
    assert wrong == []


def test_modules_say_what_they_are_and_stay_short():
    wrong = []
    for path in tracked("*.py"):
        text = path.read_text()
        if not text:
            continue
        name, num_lines = path.relative_to(ROOT), text.count("\n")
        doc = ast.get_docstring(parsed(path)) or ""
        if not doc:
            wrong.append(f"{name} has no docstring")
        if num_lines > TOO_LONG:
            wrong.append(f"{name} has {num_lines} lines: split it")
        elif num_lines > LONG and "long:" not in doc:
            wrong.append(f"{name} has {num_lines} lines: say why after `long:` in its docstring, or split it")
    assert wrong == []


def test_no_file_names_this_machine_or_a_registry():
    # Spelled in two parts, so that this file does not name them.
    forbidden = re.compile(
        "|".join(
            [
                r"(?<![\w./])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|op" + r"t/wheels)/",
                "/tmp" + "/w/",
                "py" + r"pi\.org",
                "python" + "hosted",
                "download.py" + "torch",
                "registry.npm" + "js",
                "--(?:extra-)?index" + "-url",
            ]
        )
    )
    wrong = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(text.splitlines(), 1)
            if forbidden.search(line)
        ]
    assert wrong == []


def test_packages_are_typed_and_console_scripts_exist():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == list(PACKAGES)
    assert [p for p in PACKAGES if not (ROOT / p / "py.typed").exists()] == []
    for target in project["project"]["scripts"].values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_what_is_pinned_is_what_the_project_asks_for():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no TOML reader")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for extra in ("megatron", "plot"):
        wanted += project["project"]["optional-dependencies"][extra]
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {re.match(r"[\w-]+", w)[0] for w in wanted} - pinned == set()


def test_no_script_hides_a_package_from_those_beside_it():
    # `python benchmarks/x.py` looks for imports in benchmarks/ first.
    scripts = {
        p.stem for folder in ("benchmarks", "benchmarks/anchors", "examples") for p in (ROOT / folder).glob("*.py")
    }
    assert scripts & set(PACKAGES) == set()
