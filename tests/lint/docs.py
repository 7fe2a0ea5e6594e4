"""Checks README.md and docs/: links lead to files, the C++ names of the tables for those who
come from Python exist in the public headers, and the program of README.md is an example.
"""

import pathlib
import re
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = "examples/consumer/twenty_lines.cpp"
TABLES = {"README.md": "## Coming from Python", "docs/from_python.md": ""}  # from where on

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
# What is not ours in a cell: strings, std::, torch:: and at:: names, words of the command line.
FOREIGN = re.compile(r'"[^"]*"|\b(?:std|torch|at|c10)::\w+(?:::\w+)*')
COMMAND = re.compile(r"^(?:\./)?fsdp \w+|^(?:convert|inspect|verify)$|^[A-Z_]+=")
PLACEHOLDERS = set(
    """auto bool const false int struct true void
    m p a b h f s x t comm choose embedding encode event extension fill folder fqn from head hook
    local logits mesh Net NetImpl on_meta no_grad opt path rank ranks scaler seed state targets to
    device""".split()
)


def broken_links(root, page, text):
    for link in (a or b for a, b in LINK.findall(CODE.sub("", text))):
        if "://" not in link and not (root / page).parent.joinpath(link).exists():
            yield f"{page}: nothing is at {link}"


def cells(text):
    """The second cell of each row of a table."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            parts = line.strip().strip("|").split("|")
            if len(parts) == 2:
                yield parts[1]


def unknown_names(page, text, known):
    for cell in cells(text):
        for code in re.findall(r"`([^`]+)`", cell):
            if COMMAND.match(code):
                continue
            for word in WORD.findall(FOREIGN.sub("", code)):
                if word not in known and word not in PLACEHOLDERS and word != "fsdp":
                    yield f"{page}: no public header has {word} ({code})"


def problems(root):
    pages = [root / "README.md", root / "CHANGELOG.md", root / "CONTRIBUTING.md"]
    pages += sorted((root / "docs").glob("*.md"))
    found = []
    for page in pages:
        found += broken_links(root, page.relative_to(root), page.read_text())
    known = set()
    for header in (root / "include/fsdp").glob("*.h"):
        known |= set(WORD.findall(header.read_text()))
    for page, begin in TABLES.items():
        text = (root / page).read_text()
        text = text[text.index(begin) :] if begin else text
        text = text.split("## More commands")[0]
        found += unknown_names(page, text, known)
    if f"```cpp\n{(root / PROGRAM).read_text()}```" not in (root / "README.md").read_text():
        found.append(f"README.md: the program is not {PROGRAM}")
    return found


class Docs(unittest.TestCase):
    def test_say_what_is_true(self):
        self.assertEqual(problems(ROOT), [])

    def test_problems_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for each in ("docs", "include/fsdp", "examples/consumer"):
                (root / each).mkdir(parents=True)
            (root / PROGRAM).write_text("int main() {}\n")
            (root / "include/fsdp/a.h").write_text("void save(int state);\n")
            (root / "README.md").write_text(
                "[a](docs/none.md)\n```cpp\nint main() { }\n```\n## Coming from Python\n"
                "| `x` | `save(state)`, `torch::load(x)`, `restore(state)` |\n"
            )
            (root / "CHANGELOG.md").write_text("[b](README.md)\n")
            (root / "CONTRIBUTING.md").write_text("")
            (root / "docs/from_python.md").write_text("| `x` | `async_save(state)` |\n")
            self.assertEqual(
                problems(root),
                [
                    "README.md: nothing is at docs/none.md",
                    "README.md: no public header has restore (restore(state))",
                    "docs/from_python.md: no public header has async_save (async_save(state))",
                    f"README.md: the program is not {PROGRAM}",
                ],
            )


if __name__ == "__main__":
    unittest.main()
