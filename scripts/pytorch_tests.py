#!/usr/bin/env python3
"""scripts/pytorch_tests.py CHECKOUT [options]: PyTorch's own tests of FSDP2 against fsdp_cpp.

CHECKOUT is a checkout of PyTorch. Each test runs in a process of its own, with the torch that is installed.
Tests that ask for GPUs run on the CPU over gloo if there is none, and share one if NCCL allows it
(docs/gpu.md). `--engine torch` tests torch's own engine, which tells what can pass on this machine at all.

  scripts/pytorch_tests.py ../pytorch --engine torch --out torch.json
  scripts/pytorch_tests.py ../pytorch --baseline torch.json
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types
import unittest

FOLDER = "test/distributed/_composable/fsdp"


def share_the_gpu(world: int) -> None:
    """Gives all ranks the first GPU. Tests that count GPUs count one for each rank."""
    import torch
    import torch.distributed as dist

    set_device, barrier = torch.cuda.set_device, dist.barrier
    torch.cuda.set_device = torch.accelerator.set_device_index = lambda _: set_device(0)
    dist.barrier = lambda *args, device_ids=None, **rest: barrier(*args, **rest)
    devices = types.ModuleType("torch.cuda")  # torch itself must still see one GPU
    devices.__dict__.update(torch.cuda.__dict__, device_count=lambda: world)
    torch.get_device_module = lambda device=None: devices


def prepare() -> None:
    """Makes torch's helpers for tests forget about GPUs, and gives tests the engine to test."""
    world = int(os.environ["FSDP_TEST_WORLD"])
    import torch
    import torch.testing._internal.common_distributed as common_distributed

    common_distributed.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test
    import torch.testing._internal.common_fsdp as common_fsdp

    common_fsdp.DEVICE_COUNT = world
    torch.accelerator.device_count = lambda: max(world, 8)  # else tests of more ranks are skipped
    if not torch.cuda.is_available():
        torch.cpu.device_count = lambda: world
    elif torch.cuda.device_count() < world:
        share_the_gpu(world)
    if torch.cuda.device_count() < world:
        ddp = importlib.import_module("torch.distributed._composable.replicate")  # `import as` gives the function
        replicate = ddp.replicate
        ddp.replicate = functools.wraps(replicate)(lambda *args, device_ids=None, **rest: replicate(*args, **rest))
        importlib.import_module("torch.distributed._composable").replicate = ddp.replicate  # tests import this one
    if os.environ["FSDP_TEST_ENGINE"] == "fsdp_cpp":
        import fsdp_cpp

        fsdp_cpp.patch_torch()


def run(arguments: list[str], options: argparse.Namespace, tests: int = 1) -> tuple[int | None, str]:
    """Runs this script in a process of its own. Returns no exit code if that takes longer than so many tests may."""
    environment = {"FSDP_TEST_WORLD": str(options.world), "FSDP_TEST_ENGINE": options.engine, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=tests * options.limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
        return None, process.communicate()[0]


def list_tests(files: list[str]) -> None:
    for file in files:
        try:
            importlib.import_module(file)
        except (Exception, SystemExit) as error:
            print(f"{file}.py cannot be imported: {type(error).__name__}: {error}")
            continue
        for suite in unittest.defaultTestLoader.loadTestsFromName(file):
            for test in suite:  # type: ignore[union-attr]
                print(f"TEST {test.id()}")


def outcome(code: int | None, output: str) -> str:
    if code is None:
        return "too long"
    if code != 0:
        return "failed"
    return "skipped" if re.search(r"^OK \(skipped=", output, re.M) else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--engine", default="fsdp_cpp", choices=["fsdp_cpp", "torch"])
    parser.add_argument("-k", default="", help="only tests whose name matches this regular expression")
    parser.add_argument("--world", type=int, default=2, help="ranks of tests that take all GPUs (default 2)")
    parser.add_argument("--limit", type=int, default=120, help="seconds per test (default 120)")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the results, as JSON")
    parser.add_argument("--baseline", type=pathlib.Path, help="results to compare with; exits with 1 if some are worse")
    options = parser.parse_args()
    folder = options.checkout / FOLDER
    if not folder.is_dir():
        parser.error(f"{folder} is not there: {options.checkout} is no checkout of PyTorch")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder.resolve()), *sys.path[1:]])

    results: dict[str, str] = {}
    files = sorted(file.stem for file in folder.glob("test_fully_shard_*.py"))
    code, listing = run(["--list", *files], options, tests=len(files))
    for line in re.findall(r"^\S+ cannot be imported: .*$", listing, re.M):
        print(line, flush=True)
    for test in re.findall(r"^TEST (\S+)$", listing, re.M):
        if re.search(options.k, test):
            began = time.monotonic()
            results[test] = outcome(*run(["--one", test], options))
            print(f"{results[test]:8} {time.monotonic() - began:6.1f} s  {test}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    counts = {each: list(results.values()).count(each) for each in ("passed", "failed", "too long", "skipped")}
    print(f"{len(results)} tests: " + ", ".join(f"{count} {each}" for each, count in counts.items()))
    before = json.loads(options.baseline.read_text()) if options.baseline else {}
    passed = [test for test, was in before.items() if was == "passed" and re.search(options.k, test)]
    worse = [test for test in passed if results.get(test) != "passed"]
    if before:
        print(f"{len(worse)} passed in the baseline and do not here: {' '.join(worse)}")
    if code != 0:
        print(f"Not all tests can be listed:\n{listing}")
    return 1 if worse or code != 0 or not results else 0


if __name__ == "__mp_main__":  # a rank of a test
    prepare()
elif __name__ == "__main__":
    if sys.argv[1:2] == ["--list"]:
        prepare()
        list_tests(sys.argv[2:])
    elif sys.argv[1:2] == ["--one"]:
        prepare()
        unittest.main(module=None, argv=[sys.argv[0], sys.argv[2]])
    else:
        sys.exit(main())
