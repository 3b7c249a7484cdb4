"""Checks a lesson: it runs as a script, and each of its self-checks refuses a wrong answer.

A lesson is a Python file in percent format. An exercise NAME is three functions: the stub `NAME`, whose only statement
is `raise NotImplementedError`, the self-check `check_NAME(f)`, which asserts, and `NAME_solution` at the end.
"""
import ast
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path


def exercises(path) -> list[str]:
    """Names of the lesson's exercises: the functions that only raise NotImplementedError."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)
            and ast.unparse(node.body[-1]).startswith("raise NotImplementedError")]


def check(path, wrong: dict[str, str], timeout: float = 900) -> str:
    """Runs a lesson in a process of its own, from its project's folder, and returns what it printed.

    wrong: for each exercise a wrong answer, as source in which the exercise's own name is defined. The answer runs with
    the lesson's names, and the self-check must refuse it with an AssertionError.
    Raises: AssertionError, with the process's last words, where the lesson fails, an exercise has no wrong answer
    here, or a wrong answer passes.
    """
    path = Path(path).resolve()
    assert sorted(exercises(path)) == sorted(wrong), \
        f"{path.name} has the exercises {sorted(exercises(path))}, wrong answers are given for {sorted(wrong)}"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, "-m", "common.lessons", str(path), json.dumps(wrong)], text=True, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, cwd=path.parent.parent)
    assert done.returncode == 0, f"{path.name}: exit status {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout


def main(path, wrong):
    sys.path.insert(0, str(Path(path).parent))  # as `python path` would
    names = runpy.run_path(path, run_name="__main__")
    for name, source in wrong.items():
        scope = dict(names)
        exec(source, scope)
        try:
            names[f"check_{name}"](scope[name])
        except AssertionError as why:
            print(f"{name}: the wrong answer was refused ({why})")
        else:
            sys.exit(f"{name}: the self-check accepts a wrong answer:\n{source}")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
