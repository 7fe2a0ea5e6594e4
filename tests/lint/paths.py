"""Checks that no tracked file holds a path of the machine that it was written on."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A path from the root on, also behind -I; not include/data, $dir/work or a template of mkdtemp.
PATH = re.compile(
    r"(?:(?<![\w.})\]-])|(?<=-[IL]))/"
    r"(?:tmp|var/tmp|root|home|work|workspace|builds|opt|mnt|data|srv|Users)/[\w.-]+"
)
TEMPLATE = re.compile(r"XXXXXX")


def tracked_files(root):
    # Without what a git hook sets for its own calls.
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    names = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True, env=env
    ).stdout
    return [root / name for name in names.split("\0") if name]


def problems(root, files):
    found = []
    for path in files:
        if not path.is_file():
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, 1):
            for match in PATH.findall(line):
                if not TEMPLATE.search(line):
                    found.append(f"{path.relative_to(root)}:{number}: {match}")
    return found


class Paths(unittest.TestCase):
    def setUp(self):
        if not (ROOT / ".git").exists():
            self.skipTest("this is not a git checkout")

    def test_of_no_machine(self):
        self.assertEqual(problems(ROOT, tracked_files(ROOT)), [])

    def test_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            text, code = root / "a.md", root / "b.cpp"
            tmp, home, work = "/" + "tmp", "/" + "root", "/" + "work"  # in parts, so that this file has none
            text.write_text(f'see "{tmp}/clone/x.py", -I{home}/x\nsrc{work}/a is none, nor is ${{x}}{tmp}/y\n')
            code.write_text(f'char folder[] = "{tmp}/a-XXXXXX";\n')
            self.assertEqual(problems(root, [text, code]), [f"a.md:1: {tmp}/clone", f"a.md:1: {home}/x"])


if __name__ == "__main__":
    unittest.main()
