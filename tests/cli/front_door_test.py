"""The script ./fsdp on machines that lack things, played by a PATH of fakes."""

import pathlib
import shutil
import stat
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = "bash sh echo dirname basename readlink sed xargs cut cat cmp mkdir flock grep sort head env tail".split()
ALL_HEADERS_MISSING = "printf 'libgtest-dev\\nlibcli11-dev\\nnlohmann-json3-dev\\n'"


class FrontDoor(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        base = pathlib.Path(self.folder.name)
        self.tree = base / "a tree"  # with a space
        self.bin = base / "bin"
        self.log = base / "log"
        self.tree.mkdir()
        self.bin.mkdir()
        for name in ("fsdp", "requirements.txt"):
            shutil.copy(ROOT / name, self.tree / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def fake(self, name, body):
        """A program that notes its arguments, then does `body`."""
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self.log}"\n{body}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_script(self, *words):
        return subprocess.run(
            [self.tree / "fsdp", *words],
            env={"PATH": str(self.bin), "HOME": self.folder.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )

    def calls(self, name):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(name + " ")]

    def test_without_root_it_lists_exactly_what_is_missing(self):
        self.fake("id", "echo 1000")
        self.fake("apt-get", "exit 0")
        result = self.run_script("build")
        self.assertEqual(result.returncode, 1, result.stdout)
        for part in ("not root", "python3 (3.10", "python3-venv", "g++ 11", "GoogleTest", "CLI11", "nlohmann"):
            self.assertIn(part, result.stdout)
        self.assertEqual(self.calls("apt-get"), [])

    def test_on_another_distribution_too(self):
        self.fake("id", "echo 0")
        self.fake("g++", ALL_HEADERS_MISSING)
        self.fake("python3", "exit 0")
        result = self.run_script("build")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("no apt-get", result.stdout)
        self.assertIn("GoogleTest", result.stdout)
        self.assertNotIn("C++20 compiler", result.stdout)  # that one is there

    def test_as_root_it_installs_what_is_missing(self):
        self.fake("id", "echo 0")
        self.fake("python3", "exit 0")
        self.fake("g++", ALL_HEADERS_MISSING)
        self.fake("apt-get", '[ "$1" = update ]')  # the installation itself fails
        result = self.run_script("build")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn("could not install", result.stdout)
        update, install = self.calls("apt-get")
        self.assertIn("update", update)
        for package in ("libgtest-dev", "libcli11-dev", "nlohmann-json3-dev"):
            self.assertIn(package, install)
        self.assertNotIn("g++", install)

    def test_with_sudo_where_not_root(self):
        self.fake("id", "echo 1000")
        self.fake("python3", "exit 0")
        self.fake("g++", ALL_HEADERS_MISSING)
        self.fake("apt-get", "exit 1")
        self.fake("sudo", '[ "$1" = -n ] && exit 0; exec "$@"')
        result = self.run_script("build")
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertEqual(self.calls("apt-get"), ["apt-get update -qq"])
        self.assertIn("is there a network", result.stdout)

    def test_a_venv_that_was_cut_off_is_made_anew(self):
        self.fake("id", "echo 0")
        self.fake("g++", '[ "$1" = -E ] || echo 12')
        self.fake("python3", "exit 0")
        (self.tree / ".venv" / "bin").mkdir(parents=True)
        half = self.tree / ".venv" / "bin" / "python"
        half.write_text("#!/bin/sh\nexit 1\n")  # no pip
        half.chmod(0o755)
        self.run_script("build")
        self.assertTrue(any("-m venv --clear" in call for call in self.calls("python3")))

    def test_an_old_compiler_is_refused(self):
        self.fake("id", "echo 0")
        self.fake("python3", "exit 0")
        self.fake("g++", '[ "$1" = -E ] || echo 9')
        result = self.run_script("build")
        self.assertIn("needs g++ 11", result.stdout)

    def test_the_tool_learns_how_it_was_started(self):
        self.fake("g++", '[ "$1" = -E ] || echo 12')
        self.fake("ninja", "echo ninja: no work to do.")
        venv = self.tree / ".venv"
        (venv / "bin").mkdir(parents=True)
        shutil.copy(self.tree / "requirements.txt", venv / ".fsdp-ready")
        build = self.tree / "build" / "dev"
        (build / "bin").mkdir(parents=True)
        (build / "build.ninja").touch()
        (build / ".fsdp-configured").write_text(f"{venv}/bin/python g++\n")
        tool = build / "bin" / "fsdp"
        tool.write_text('#!/bin/sh\necho "$FSDP_COMMAND $*"\n')
        tool.chmod(0o755)
        result = self.run_script("train", "--steps", "3")
        self.assertEqual(result.stdout, f"{self.tree}/fsdp train --steps 3\n")

    def test_wrong_words_are_refused_before_anything_is_installed(self):
        for words in (["bench"], ["bench", "nonsense"], ["install"]):
            (self.tree / "benchmarks").mkdir(exist_ok=True)
            (self.tree / "benchmarks" / "collectives_bench.cpp").touch()
            result = self.run_script(*words)
            self.assertEqual(result.returncode, 1, result.stdout)
        self.assertEqual(self.calls("apt-get"), [])


if __name__ == "__main__":
    unittest.main()
