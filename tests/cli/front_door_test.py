"""The script ./fsdp on machines that lack things, played by a PATH of fakes."""

import pathlib
import shutil
import stat
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = """bash sh echo dirname basename readlink sed xargs cut cat cmp mkdir flock grep sort head env tail df rm
cp nproc true touch""".split()
ALL_HEADERS = ("libgtest-dev", "libcli11-dev", "nlohmann-json3-dev")


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

    def fake_compiler(self, name="g++", version=12, misses=()):
        """One that does not find the headers of the packages `misses`."""
        words = f"clang version {version}" if "clang" in name else f"g++ {version}"
        headers = "".join(f"{package}\\n" for package in misses)
        self.fake(name, f'case $1 in -E) printf "{headers}";; --version) echo {words};; *) echo {version};; esac')

    def fake_setup(self, compiler="g++"):
        """Everything is installed and configured, and there is nothing to build."""
        self.fake("ninja", "echo ninja: no work to do.")
        self.fake_venv(".fsdp-made")
        venv = self.tree / ".venv"
        shutil.copy(self.tree / "requirements.txt", venv / ".fsdp-ready")
        build = self.tree / "build" / "dev"
        (build / "bin").mkdir(parents=True)
        (build / "build.ninja").touch()
        (build / ".fsdp-configured").write_text(f"{venv}/bin/python\n{compiler}\n")
        return build

    def run_script(self, *words, **env):
        return subprocess.run(
            [self.tree / "fsdp", *words],
            env={"PATH": str(self.bin), "HOME": self.folder.name, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )

    def calls(self, name):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(name + " ")]

    def refused(self, *parts, words=("build",), **env):
        """Runs the script, which must stop with a sentence that has these parts; returns it."""
        result = self.run_script(*words, **env)
        self.assertEqual(result.returncode, 1, result.stdout)
        for part in parts:
            self.assertIn(part, result.stdout)
        return result.stdout

    # --- what is missing

    def test_help_installs_nothing(self):
        for job in ("build", "test", "python", "install", "format"):
            run = self.run_script(job, "--help")
            self.assertEqual(run.returncode, 0, job)
            self.assertIn("./fsdp test [ctest options]", run.stdout)

    def test_without_root_it_lists_exactly_what_is_missing(self):
        self.fake("id", "echo 1000")
        self.fake("apt-get", "exit 0")
        self.refused("not root", "python3 (3.10", "python3-venv", "clang 19 or g++ 12", "GoogleTest", "CLI11", "nlohmann")
        self.assertEqual(self.calls("apt-get"), [])

    def test_on_another_distribution_too(self):
        self.fake("id", "echo 0")
        self.fake_compiler(misses=ALL_HEADERS)
        self.fake("python3", "exit 0")
        printed = self.refused("no apt-get", "GoogleTest")
        self.assertNotIn("C++20 compiler", printed)  # that one is there

    def test_as_root_it_installs_what_is_missing(self):
        self.fake("id", "echo 0")
        self.fake("python3", "exit 0")
        self.fake_compiler("clang++-19", 19, misses=ALL_HEADERS)
        self.fake("apt-get", '[ "$1" = update ]')  # the installation itself fails
        self.refused("could not install", "Is there a network")
        update, install = self.calls("apt-get")
        self.assertIn("update", update)
        for package in ALL_HEADERS:
            self.assertIn(package, install)
        self.assertNotIn("clang", install)

    def test_with_sudo_where_not_root(self):
        self.fake("id", "echo 1000")
        self.fake("python3", "exit 0")
        self.fake_compiler(misses=ALL_HEADERS)
        self.fake("apt-get", "exit 1")
        self.fake("sudo", '[ "$1" = -n ] && exit 0; exec "$@"')
        self.refused("Is there a network", "libgtest-dev")
        self.assertEqual(self.calls("apt-get"), ["apt-get update -qq"])
        self.assertEqual(self.calls("sudo")[-1], "sudo apt-get update -qq")

    # --- the compiler

    def test_the_quicker_compiler_is_taken(self):
        self.fake("python3", "exit 1")
        self.fake("id", "echo 0")
        self.fake("apt-get", "exit 0")
        self.fake_compiler("g++", 12)
        self.fake_compiler("clang++-19", 19)
        self.run_script("build")
        self.assertTrue(any("-E" in call for call in self.calls("clang++-19")))
        self.assertFalse(any("-E" in call for call in self.calls("g++")))

    def test_the_quicker_compiler_is_installed_where_that_is_allowed(self):
        self.fake("id", "echo 0")
        self.fake("python3", "exit 0")
        self.fake("apt-get", "exit 0")
        self.fake_compiler()
        self.run_script("build")
        self.assertIn("clang-19 lld-19", self.calls("apt-get")[-1])

    def test_without_a_network_the_other_compiler_will_do(self):
        self.fake("id", "echo 0")
        self.fake("python3", '[ "$2" != venv ]')  # goes no further than this
        self.fake("apt-get", "exit 1")
        self.fake_compiler()
        self.refused("going on without", "making .venv failed")

    def test_what_is_needed_does_not_wait_for_the_quicker_compiler(self):
        self.fake("id", "echo 0")
        self.fake("python3", '[ "$2" != venv ]')
        self.fake("apt-get", 'case "$*" in *clang*) exit 1 ;; esac')
        self.fake_compiler(misses=["libgtest-dev"])
        self.refused("going on without", "making .venv failed")
        self.assertTrue(any("libgtest-dev" in call for call in self.calls("apt-get")))

    def test_a_configured_folder_keeps_its_compiler(self):
        build = self.fake_setup("g++")
        self.fake_compiler("g++", 12)
        self.fake_compiler("clang++-19", 19)
        (build / "bin" / "fsdp").write_text("#!/bin/sh\n")
        (build / "bin" / "fsdp").chmod(0o755)
        result = self.run_script("doctor")
        self.assertEqual((result.returncode, result.stdout), (0, ""))
        self.assertFalse(any("-E" in call for call in self.calls("clang++-19")))

    def test_an_old_or_missing_compiler_is_refused(self):
        self.fake("id", "echo 0")
        self.fake("python3", "exit 0")
        self.fake_compiler("old-g++", 9)
        self.refused("old-g++ is version 9", "g++ 12 or clang 19", CXX="old-g++")
        self.fake_compiler("old-clang++", 14)
        self.refused("old-clang++ is version 14", CXX="old-clang++")
        self.refused("there is no compiler 'none'", CXX="none")

    # --- installing

    def test_without_space_nothing_is_installed(self):
        self.fake_compiler("clang++-19", 19)
        self.fake("python3", "exit 0")
        (self.bin / "df").unlink()
        self.fake("df", "echo Avail; echo 500000")
        self.refused("takes about 3 GiB", "488 MiB left")
        self.assertFalse((self.tree / ".venv").exists())

    def test_a_failed_installation_leaves_no_half_of_one(self):
        self.fake_compiler("clang++-19", 19)
        # A venv whose pip fails, and has written something before.
        make = 'mkdir -p "$4/bin"; printf "#!/bin/sh\\n[ \\$3 = --version ]\\n" > "$4/bin/python"; chmod +x "$4/bin/python"'
        (self.bin / "chmod").symlink_to(shutil.which("chmod"))
        self.fake("python3", f'[ "$2" = venv ] || exit 0; {make}')
        self.refused("pip could not install", "is there a network")
        self.assertFalse((self.tree / ".venv").exists())

    def fake_venv(self, *files):
        (self.tree / ".venv" / "bin").mkdir(parents=True)
        python = self.tree / ".venv" / "bin" / "python"
        python.write_text("#!/bin/sh\nexit 1\n")  # no pip
        python.chmod(0o755)
        for name in files:
            (self.tree / ".venv" / name).touch()

    def test_a_venv_that_was_cut_off_is_made_anew(self):
        self.fake_compiler("clang++-19", 19)
        self.fake("python3", "exit 0")
        self.fake_venv(".fsdp-made")
        self.run_script("build")
        self.assertTrue(any("-m venv --clear" in call for call in self.calls("python3")))

    def test_a_venv_of_somebody_else_is_left_alone(self):
        self.fake_compiler("clang++-19", 19)
        self.fake("python3", "exit 0")
        self.fake_venv("mine")
        for words in (["build"], ["format", "--check"]):
            self.refused("was not made by ./fsdp", "FSDP_PYTHON", words=words)
        self.assertTrue((self.tree / ".venv" / "mine").exists())
        self.assertEqual([call for call in self.calls("python3") if "venv --clear" in call], [])

    def test_a_folder_that_cannot_be_written_is_refused(self):
        (self.tree / "build").touch()  # root may write everywhere, but not into a file
        self.refused("cannot be written to", "a tree")

    # --- jobs

    def test_the_tool_learns_how_it_was_started(self):
        self.fake_compiler()
        tool = self.fake_setup() / "bin" / "fsdp"
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
