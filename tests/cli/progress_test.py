"""What scripts/progress.py makes of the output of ninja and ctest."""

import io
import pathlib
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import progress  # noqa: E402

BUILD = """[1/3] Building CXX object a.cpp.o
[2/3] Building CXX object b.cpp.o
FAILED: [code=1] b.cpp.o
c++ -c b.cpp
b.cpp:1: error: no

  and a line after an empty one
ninja: build stopped: subcommand failed.
"""
TESTS = """Test project build/dev
      Start  1: Mesh.Shape
 1/3 Test  #1: Mesh.Shape ...........   Passed    0.31 sec
      Start  2: Gpu.Streams
 2/3 Test  #2: Gpu.Streams ..........***Skipped   0.02 sec
      Start  3: Mesh.Slices
 3/3 Test  #3: Mesh.Slices ..........***Failed    1.50 sec
mesh_test.cpp:7: Failure

67% tests passed, 1 tests failed out of 3

Total Test time (real) =   1.90 sec
"""


def watched(watch, lines, is_terminal=False, costs=()):
    out = io.StringIO()
    watch(lines, out, progress.Line(out, is_terminal, costs))
    return out.getvalue()


def watched_build(text, **how):
    return watched(progress.watch_build, text.splitlines(), **how)


def watched_tests(text):
    return watched(progress.watch_tests, text.splitlines())


class Progress(unittest.TestCase):
    def test_a_failed_command_is_shown_whole_and_the_others_are_not(self):
        self.assertEqual(watched_build(BUILD), BUILD[BUILD.index("FAILED") :])

    def test_a_terminal_sees_one_line(self):
        shown = watched_build(BUILD[: BUILD.index("FAILED")], is_terminal=True)
        self.assertNotIn("\n", shown)
        self.assertIn("\r\033[K2 of 3 done in 0:00, about 0:00 left: b.cpp.o", shown)
        self.assertTrue(shown.endswith("\r\033[K"), "the line is gone at the end")

    def test_failed_tests_are_shown_and_the_slowest_before_the_summary(self):
        self.assertEqual(
            watched_tests(TESTS),
            " 3/3 Test  #3: Mesh.Slices ..........***Failed    1.50 sec\n"
            "mesh_test.cpp:7: Failure\n\n"
            "The slowest tests:\n     1.5 s  Mesh.Slices\n     0.3 s  Mesh.Shape\n     0.0 s  Gpu.Streams\n\n"
            "67% tests passed, 1 tests failed out of 3\n\nTotal Test time (real) =   1.90 sec\n",
        )

    def test_time_goes_on_while_nothing_ends(self):
        shown = watched(progress.watch_build, [None, "[1/3] Building a.o", None, None], is_terminal=True, costs=[10] * 3)
        self.assertEqual((shown.count("0 of 3 done"), shown.count("1 of 3 done")), (1, 3))

    def test_output_of_a_failed_test_may_look_like_progress(self):
        failed = " 1/1 Test #1: Package.Builds .......***Timeout 900.01 sec\n[1/40] Building a.o\n"
        self.assertEqual(watched_tests(failed), failed)

    def test_the_time_left_counts_a_unit_for_more_than_a_link(self):
        unit, link = "Building CXX object Unity/unity_mesh.o", "Linking CXX executable a"
        self.assertGreater(progress.cost(unit), 10 * progress.cost(link))

    def test_the_time_left_is_never_negative(self):
        line = progress.Line(io.StringIO(), False, [1, 1])
        line.advance(2, 2, "Building CXX object that was planned as a link")
        self.assertIn("about 0:00 left", line.text(60))

    def test_it_does_not_guess_from_next_to_nothing(self):
        line = progress.Line(io.StringIO(), False, [150] + [1] * 9)
        line.advance(1, 10, "Linking CXX static library")
        self.assertEqual(line.text(60), "1 of 10 done in 1:00")

    def test_a_reader_who_leaves_ends_the_command(self):
        lines = "while true; do echo line; done"
        command = [sys.executable, ROOT / "scripts/progress.py", "sh", "-c", lines]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            child.stdout.readline()
            child.stdout.close()
            self.assertEqual(child.wait(timeout=60), 128 + 13)
            self.assertEqual(child.stderr.read(), b"")

    def test_it_exits_as_the_command_does(self):
        for code in (0, 3):
            command = [sys.executable, ROOT / "scripts/progress.py", "sh", "-c", f"echo said; exit {code}"]
            result = subprocess.run(command, capture_output=True, text=True)
            self.assertEqual((result.returncode, result.stdout), (code, "said\n"))


if __name__ == "__main__":
    unittest.main()
