"""Checks that no tracked file holds a path of the machine that it was written on."""

import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# /tmp/x or /home/me, but not include/data, $dir/work or a template of mkdtemp.
PATH = re.compile(r"(?<![\w.})\]>-])/(?:tmp|root|home|work|opt|mnt|srv|Users)/[\w.-]+")
TEMPLATE = re.compile(r"XXXXXX")


def tracked_files(root):
    names = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout
    return [root / name for name in names.split("\0") if name]


def problems(root):
    found = []
    for path in tracked_files(root):
        if path == pathlib.Path(__file__).resolve() or not path.is_file():
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
        self.assertEqual(problems(ROOT), [])

    def test_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "a.md").write_text('see "/tmp/clone/x.py"\nsrc/work/a is none, nor is ${x}/tmp/y\n')
            (root / "b.cpp").write_text('char folder[] = "/tmp/a-XXXXXX";\n')
            subprocess.run(["git", "init", "-q", root], check=True)
            subprocess.run(["git", "-C", root, "add", "."], check=True)
            self.assertEqual(problems(root), ["a.md:1: /tmp/clone"])


if __name__ == "__main__":
    unittest.main()
