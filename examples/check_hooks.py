"""The hook points of slime and AReaL, as recorded, against a checkout of theirs.

    git clone https://github.com/THUDM/slime; python -m examples.check_hooks slime slime
    python -m examples.check_hooks areal PATH --commit REV        # another revision than what is checked out
    python -m examples.check_hooks slime PATH --record            # after the adapter was brought up to date

`examples/interfaces/<trainer>.json` holds the facts that `<trainer>_hooks.py` relies on, at one commit: `derive` finds
each again in the sources, read by `git show` and parsed, never imported. A fact is named by `KIND FILE NAME`:

    signature   arguments of a function or method; of a class: its base classes
    calls       how the function before `>` calls what stands after it
    option      how a command line option is declared
    field       annotation and default of a class attribute
    sets        what a function assigns to an attribute

Exit status: 0 all as recorded, 1 some differ (each is printed), 2 the checkout cannot be read.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "interfaces"
TRAINERS = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))

Found = str | list[str] | None
"""None: it is not there."""


def recorded(trainer: str) -> dict[str, Any]:
    """`repository`, `commit`, `date` and `facts`."""
    record: dict[str, Any] = json.loads((FOLDER / f"{trainer}.json").read_text())
    return record


def derive(fact: str, source: str) -> Found:
    """What `source`, the text of the fact's file, says of it."""
    kind, _, name = fact.split(" ", 2)
    return _KINDS[kind](ast.parse(source), name)


def _find(tree: ast.Module, name: str) -> Any:
    """The class or function `A.b` of a module."""
    node: Any = tree
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next((n for n in getattr(node, "body", ()) if isinstance(n, kinds) and n.name == part), None)
    return node


def _signature(tree: ast.Module, name: str) -> Found:
    node = _find(tree, name)
    if isinstance(node, ast.ClassDef):
        return ", ".join(ast.unparse(base) for base in node.bases)
    return None if node is None else ast.unparse(node.args)


def _calls(tree: ast.Module, name: str) -> Found:
    where, _, callee = name.partition(" > ")
    node = _find(tree, where)
    return node and [ast.unparse(c) for c in _walk(node) if isinstance(c, ast.Call) and ast.unparse(c.func) == callee]


def _option(tree: ast.Module, name: str) -> Found:
    for node in _walk(tree):
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Constant) and a.value == name for a in node.args):
            return ", ".join(ast.unparse(k) for k in node.keywords if k.arg != "help")
    return None


def _field(tree: ast.Module, name: str) -> Found:
    where, _, attribute = name.rpartition(".")
    for node in getattr(_find(tree, where), "body", ()):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == attribute:
            return ast.unparse(node).partition(": ")[2]
    return None


def _sets(tree: ast.Module, name: str) -> Found:
    where, _, target = name.partition(" > ")
    node = _find(tree, where)
    found = []
    for n in _walk(node) if node else ():
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AnnAssign) else []
        value = getattr(n, "value", None)
        if value is None:
            continue
        for t in targets:
            if ast.unparse(t) == target:
                found.append(ast.unparse(value))
            elif isinstance(t, ast.Tuple) and target in [ast.unparse(e) for e in t.elts]:
                found.append(f"{ast.unparse(t)} = {ast.unparse(value)}")
    return found or None


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """In the order of the text, which `ast.walk` is not."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


_KINDS: dict[str, Callable[[ast.Module, str], Found]] = {
    "calls": _calls,
    "field": _field,
    "option": _option,
    "sets": _sets,
    "signature": _signature,
}


def _git(checkout: str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("checkout", help="folder of a git clone, a bare one too")
    parser.add_argument("--commit", default="HEAD", help="what to look at (default HEAD)")
    parser.add_argument("--record", action="store_true", help="write what is found, in the place of what is recorded")
    args = parser.parse_args(arguments)
    record = recorded(args.trainer)
    try:
        commit = _git(args.checkout, "rev-parse", f"{args.commit}^{{commit}}").strip()
        there = set(_git(args.checkout, "ls-tree", "-r", "--name-only", commit).splitlines())
        files = {file for file in (fact.split(" ")[1] for fact in record["facts"]) if file in there}
        sources = {file: _git(args.checkout, "show", f"{commit}:{file}") for file in sorted(files)}
        date = _git(args.checkout, "show", "-s", "--format=%cs", commit).strip()
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"{args.checkout}: {getattr(e, 'stderr', None) or e}", file=sys.stderr)
        return 2
    found = {
        fact: derive(fact, sources[file]) if (file := fact.split(" ")[1]) in sources else None
        for fact in record["facts"]
    }
    if args.record:
        missing = [fact for fact, value in found.items() if not value and value != ""]
        if missing:
            print("not there, nothing was recorded:", *missing, sep="\n  ", file=sys.stderr)
            return 1
        record |= {"commit": commit, "date": date, "facts": dict(sorted(found.items()))}
        (FOLDER / f"{args.trainer}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"{args.trainer}: {len(found)} facts recorded at {commit}")
        return 0
    differ = {fact: value for fact, value in found.items() if value != record["facts"][fact]}
    for fact, value in differ.items():
        print(f"{fact}\n  recorded: {record['facts'][fact]}\n  found:    {value}")
    print(f"{args.trainer} at {commit}: {len(found) - len(differ)} of {len(found)} facts as at {record['commit']}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
