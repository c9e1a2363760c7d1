"""make mutants: changes operators and constants of the pure modules, one at a time, and asks
whether a test notices.

In: modules.toml, or some of its names as arguments; --again asks once more about what survived.
Out: build/mutants/results.txt, with each survivor's line and change. cosmic-ray makes the changes
in a copy of the tree and keeps a session per module, so that a run that is stopped goes on where it
was. A module that changed begins anew. docs/lab-notes/mutants.md says what survives and why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutants"
BIN = ROOT / ".venvs" / "mutants" / "bin"
TIMEOUT_S = 240.0

# One change for each operator: to its neighbor, which hides best. No | and no exceptions: they
# stand in annotations and messages. Names are not exchanged.
KEPT = (
    r"Comparison\w+_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)",
    r"Binary\w+_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul|Pow_Mul|BitAnd_BitOr)",
    r"Unary\w+_(Delete_Not|Delete_USub|Delete_Invert|USub_UAdd)",
    r"ReplaceAndWithOr|ReplaceOrWithAnd|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|NumberReplacer",
    r"ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="names of modules.toml; none is all of them")
    parser.add_argument("--again", action="store_true", help="ask once more about what survived")
    asked = parser.parse_args()
    table = tomllib.loads((Path(__file__).parent / "modules.toml").read_text())
    if unknown := set(asked.modules) - set(table):
        parser.error(f"{', '.join(sorted(unknown))}: modules.toml has {', '.join(table)}")
    for module in asked.modules or table:
        # a copy for each, so that two runs can share the work
        tree = BUILD / session_of(module).stem
        copy_tree(tree)
        session = begin(module, tree, again=asked.again)
        tests = [f"tests/unit/{name}" for name in table[module]["tests"]]
        with serving(tree, module, tests) as address:
            ask(address, wanted=0)  # the tests pass where nothing is changed
            write_config(module, address)
            subprocess.run(
                [BIN / "cosmic-ray", "exec", session.with_suffix(".toml"), session],
                cwd=tree,
                check=True,
            )
            # a server that died would have passed for a catch of all that followed
            ask(address, wanted=0)
        write_results(list(table))


def copy_tree(tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("src", "tests"):
        shutil.copytree(
            ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / name, tree / name)
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, tree / name)


def session_of(module: str) -> Path:
    return BUILD / f"{module.replace('/', '.').removesuffix('.py')}.sqlite"


def begin(module: str, tree: Path, *, again: bool) -> Path:
    """Find the module's session, or make one where there is none of this source."""
    session = session_of(module)
    digest = hashlib.sha256((ROOT / "src" / "gyre" / module).read_bytes()).hexdigest()
    mark = session.with_suffix(".sha256")
    if not (session.exists() and mark.exists() and mark.read_text() == digest):
        session.unlink(missing_ok=True)
        config = write_config(module, "")
        subprocess.run([BIN / "cosmic-ray", "init", config, session], cwd=tree, check=True)
        subprocess.run([BIN / "cr-filter-operators", session, config], cwd=tree, check=True)
        mark.write_text(digest)
        leave_out(session, (ROOT / "src" / "gyre" / module).read_text().splitlines())
    if again:
        with sqlite3.connect(session) as base:
            base.execute("DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")
    return session


def leave_out(session: Path, lines: list[str]) -> None:
    """Forget changes of decorators, of the * of a signature, and of zip's strict=True, which is an
    assertion."""
    with sqlite3.connect(session) as base:
        places = base.execute(
            "SELECT job_id, start_pos_row, start_pos_col FROM mutation_specs"
        ).fetchall()
        for job, row, column in places:
            before, rest = lines[row - 1][:column], lines[row - 1][column:]
            star = rest.startswith("*") and (before.rstrip() + " ")[-2:] in (", ", "( ", " ")
            if star or before.endswith("strict=") or lines[row - 1].lstrip().startswith("@"):
                for table in ("work_results", "mutation_specs", "work_items"):
                    base.execute(f"DELETE FROM {table} WHERE job_id = ?", (job,))


def write_config(module: str, address: str) -> Path:
    """cosmic-ray's settings of one module."""
    path = session_of(module).with_suffix(".toml")
    refused = f"^(?!.*({'|'.join(KEPT)})$)"
    lines = [
        "[cosmic-ray]",
        f'module-path = "src/gyre/{module}"',
        f"timeout = {TIMEOUT_S}",
        "excluded-modules = []",
        f"test-command = {json.dumps(f'{BIN}/python -S {ROOT}/tests/mutants/ask.py {address}')}",
        "[cosmic-ray.distributor]",
        'name = "local"',
        "[cosmic-ray.filters.operators-filter]",
        f"exclude-operators = [{json.dumps(refused)}]",
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def serving(tree: Path, module: str, tests: list[str]) -> Iterator[str]:
    """Start the warm Python; it ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        command = [
            sys.executable,
            ROOT / "tests" / "mutants" / "serve.py",
            address,
            f"src/gyre/{module}",
            *tests,
        ]
        env = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        with (tree / "tests.log").open("w") as log:
            server = subprocess.Popen(command, cwd=tree, env=env, stdout=log, stderr=log)
        try:
            while not Path(address).exists():
                assert server.poll() is None, f"it ended: see {tree / 'tests.log'}"
                time.sleep(0.1)
            yield address
        finally:
            server.kill()
            server.wait()


def ask(address: str, *, wanted: int) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(address)
        answer = client.recv(1)
    if not answer:
        sys.exit("the warm Python ended: this module's results say nothing, remove its session")
    if answer[0] != wanted:
        sys.exit("the tests fail before anything is changed: its tests.log")


def write_results(modules: list[str]) -> None:
    """The table of modules and the list of survivors."""
    table, survivors = [f"{'module':<28}{'changed':>8}{'caught':>8}{'left':>8}"], []
    for module in modules:
        if not session_of(module).exists():
            continue
        with sqlite3.connect(session_of(module)) as base:
            rows = base.execute(
                "SELECT s.start_pos_row, s.operator_name, s.occurrence, r.test_outcome, "
                "r.worker_outcome, r.diff "
                "FROM mutation_specs s LEFT JOIN work_results r ON s.job_id = r.job_id ORDER BY "
                "s.start_pos_row"
            ).fetchall()
        rows = [row for row in rows if row[4] != "SKIPPED"]
        done = [row for row in rows if row[3] is not None]
        lived = [row for row in done if row[3] == "SURVIVED"]
        table.append(
            f"{module:<28}{len(done):>8}{len(done) - len(lived):>8}{len(rows) - len(done):>8}"
        )
        for line, operator, occurrence, _, _, diff in lived:
            change = [
                text
                for text in (diff or "").splitlines()
                if text[:1] in "+-" and text[:3] not in ("+++", "---")
            ]
            survivors.append(
                f"{module}:{line} {operator.removeprefix('core/')} {occurrence}\n  "
                + "\n  ".join(change)
            )
    (BUILD / "results.txt").write_text("\n".join([*table, "", *survivors]) + "\n")
    print("\n".join(table))


if __name__ == "__main__":
    BUILD.mkdir(parents=True, exist_ok=True)
    main()
