"""The package's types hold, and those of a program that uses it."""

import os
import pathlib
import subprocess
import sys

import pytest

import fsdp_cpp

ROOT = pathlib.Path(__file__).parents[2]


def test_types(tmp_path):
    pytest.importorskip("mypy")
    installed = pathlib.Path(fsdp_cpp.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-m", "mypy", f"--cache-dir={tmp_path}", ROOT / "python/fsdp_cpp", ROOT / "examples/python"],
        env={**os.environ, "MYPYPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
