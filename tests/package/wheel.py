"""Builds a wheel of fsdp_cpp, installs it into a new environment, and trains there with both engines.

The training has no compiler in its PATH.

Usage: wheel.py SOURCE WORK. Exits with 77 if pip cannot get torch into the new environment.
"""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

source, work = (Path(word) for word in sys.argv[1:])


def run(*command, env=None):
    print("+", *command, flush=True)
    words = [str(word) for word in command]
    return subprocess.run(words, check=True, cwd=work, stdout=subprocess.PIPE, text=True, env=env).stdout


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
pip = ("-m", "pip", "--disable-pip-version-check")
python = work / "venv/bin/python"
run(sys.executable, "-m", "venv", "venv")
try:
    more = shlex.split(os.environ.get("FSDP_PIP_ARGS", ""))
    run(python, *pip, "install", *more, f"torch=={torch.__version__.split('+')[0]}", "numpy")
except subprocess.CalledProcessError:
    sys.exit(77)
# Without isolation, pip builds with the tools and the torch of this interpreter. Code that is not optimised is
# compiled in less time.
settings = (f"-Cbuild-dir={work}/build", "-Ccmake.define.CMAKE_CXX_FLAGS_RELEASE=-O0")
run(sys.executable, *pip, "wheel", source, "--no-build-isolation", "--no-deps", "-w", work, *settings)
(wheel,) = work.glob("fsdp_cpp-*.whl")
missing = {"fsdp_cpp/py.typed", "fsdp_cpp/_C.pyi", "fsdp_cpp/__init__.py"} - set(zipfile.ZipFile(wheel).namelist())
assert not missing, missing
run(python, *pip, "install", "--no-deps", wheel)
without_compiler = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
without_compiler["PATH"] = str(python.parent)
assert not any(shutil.which(name, path=without_compiler["PATH"]) for name in ("cc", "c++", "gcc", "clang", "ld"))
launcher = (python, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
losses = [
    run(*launcher, source / "examples/python/train.py", "--engine", engine, env=without_compiler)
    for engine in ("torch.distributed.fsdp", "fsdp_cpp")
]
print(losses)
assert losses[0].startswith("loss ") and losses[0] == losses[1]
