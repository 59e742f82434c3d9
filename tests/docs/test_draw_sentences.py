"""The script that draws sentences for reviews finds prose only, and draws the same sentences for the same seed."""

import subprocess
import sys

from tests.support.scripts import ROOT, script

draw_sentences = script("docs/draw_sentences.py")

PAGE = """---
title: one word after another in the front matter.
---
# A heading that has more than five words.

The first sentence is on
two lines. The second one also has some `code` in it!

- A list item with text, too. Short one.

```python
print("code with more words than five.")
```

| short cell | a cell of a table with more words |

<!-- bench:x -->
A generated sentence with many words is skipped.
<!-- /bench -->
"""
FOUND = [
    "The first sentence is on two lines.",
    "The second one also has some `code` in it!",
    "A list item with text, too.",
    "a cell of a table with more words",
]

MODULE = '''"""The module has a docstring here."""

class Options:
    """The class has a docstring too."""

    size: int = 3
    """The help text of an option."""
    shape: Annotated[str, arg(help="Another help text of an option.")] = ""

    def run(self):
        """Return nothing in this short example.

        Args:
            size: the number of things to run.

        >>> print("an example with many more words than five.")
        """
        self.text = "A string that is no docstring at all."
'''
HELP = ["The help text of an option.", "Another help text of an option."]


def test_sentences_of_a_page(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    assert draw_sentences.of_page(tmp_path / "page.md") == FOUND


def test_sentences_of_a_module(tmp_path):
    (tmp_path / "module.py").write_text(MODULE)
    docstrings = draw_sentences.of_module(tmp_path / "module.py", help_texts=False)
    assert sorted(docstrings) == [
        "Return nothing in this short example.",
        "The class has a docstring too.",
        "The module has a docstring here.",
        "the number of things to run.",
    ]
    assert draw_sentences.of_module(tmp_path / "module.py", help_texts=True) == HELP


def test_draws_depend_on_the_seed_only():
    first = draw_sentences.drawn(25, 0)
    assert len(first) == 25
    for source in (first[:9], first[9:17], first[17:]):
        assert len({path for path, _ in source}) == len(source)
    assert {path.suffix for path, _ in first} == {".md", ".py"}
    assert draw_sentences.drawn(25, 0) == first
    assert draw_sentences.drawn(25, 1) != first


def test_the_script_prints_file_and_sentence():
    command = [sys.executable, str(ROOT / "docs" / "draw_sentences.py"), "--count", "3", "--seed", "5"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        path, _, sentence = line.partition(": ")
        assert (ROOT / path).is_file()
        assert sentence
