"""Checks docs/fsdp2_tests.md: one row for every test of upstream's suite, in the
order of upstream_tests.txt, and every test that it names exists.
"""

import collections
import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

UPSTREAM = "tests/lint/upstream_tests.txt"
MAP = "docs/fsdp2_tests.md"

# TEST_P's suite is named without the prefix of its instantiation.
TEST = re.compile(r"^TEST(?:_[PF])?\(\s*(\w+)\s*,\s*(?!DISABLED_)(\w+)\s*\)", re.MULTILINE)
NAMED = re.compile(r"`(\w+\.\w+)`")


def upstream_names(text):
    lines = [line.split() for line in text.splitlines() if line.strip() and line[0] != "#"]
    return [name for _, name in lines]


def rows_of(text):
    """(upstream test, what is here) of each row whose first cell is a name."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.lstrip().startswith("|") and cells[0].startswith("test_"):
            rows.append((cells[0], cells[2] if len(cells) == 3 else None))
    return rows


def problems(root):
    names = upstream_names((root / UPSTREAM).read_text())
    rows = rows_of((root / MAP).read_text())
    tests = {
        f"{suite}.{name}"
        for path in (root / "tests").rglob("*.cpp")
        for suite, name in TEST.findall(path.read_text())
    }
    counts = collections.Counter(name for name, _ in rows)
    found = [f"{name}: no row" for name in names if name not in counts]
    found += [f"{name}: {count} rows" for name, count in counts.items() if count > 1]
    found += [f"{name}: not in {UPSTREAM}" for name in counts if name not in names]
    if not found and [name for name, _ in rows] != names:
        found.append(f"the rows are not in the order of {UPSTREAM}")
    for name, here in rows:
        if here is None:
            found.append(f"{name}: a row has three cells")
            continue
        named = NAMED.findall(here)
        found += [f"{name}: there is no test {test}" for test in named if test not in tests]
        if not named and "no counterpart: " not in here:
            found.append(f"{name}: neither a test, nor why there is no counterpart")
    return found


class Fsdp2Map(unittest.TestCase):
    def test_every_upstream_test_has_its_row(self):
        self.assertEqual(problems(ROOT), [])

    def check(self, rows, expected):
        tree = {
            UPSTREAM: "# names\ncore test_a\nwider test_b\n",
            MAP: "# A map\n\n| upstream test | what | here |\n|---|---|---|\n" + "\n".join(rows),
            "tests/room/x_test.cpp": "TEST(Plain, One) {\nTEST_F(\n    Fixture, Two) {\n"
            "TEST_P(Param, Three) {\nTEST(Plain, DISABLED_Four) {\n// TEST(Plain, Five) {\n",
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in tree.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            found = problems(root)
        self.assertEqual(len(found), len(expected), found)
        for problem, part in zip(found, expected):
            self.assertIn(part, problem)

    def test_right_rows_pass(self):
        b = "| test_b | x | no counterpart: Python's |"
        for here in ("`Plain.One`", "`Fixture.Two`, `Param.Three`; more later"):
            self.check([f"| test_a | x | {here} |", b], [])

    def test_wrong_rows_are_caught(self):
        a, b = "| test_a | x | `Plain.One` |", "| test_b | x | `Fixture.Two` |"
        self.check([a], ["test_b: no row"])
        self.check([a, b, a], ["test_a: 2 rows"])
        self.check([a, b, "| test_c | x | `Plain.One` |"], ["test_c: not in"])
        self.check([b, a], ["not in the order"])
        for test in ("Plain.Six", "Plain.DISABLED_Four", "Plain.Five", "All/Param.Three"):
            # The last is not even taken for the name of a test.
            expected = "neither a test" if "/" in test else f"no test {test}"
            self.check([f"| test_a | x | `{test}` |", b], [expected])
        self.check(["| test_a | x | `Plain.One`, `Plain.Six` |", b], ["no test Plain.Six"])
        for here in ("", "Plain.One", "later", "3/8", "no counterpart"):
            self.check([f"| test_a | x | {here} |", b], ["neither a test"])
        self.check(["| test_a | x |", b], ["three cells"])
        self.check(["| test_a | x | `Plain.One` | y |", b], ["three cells"])


if __name__ == "__main__":
    unittest.main()
