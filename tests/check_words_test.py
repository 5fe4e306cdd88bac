"""Each rule of tools/check_words.py bites, and a clean tree passes. It needs the standard library alone."""
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
import check_words  # noqa: E402


def in_tree(function, files, *arguments):
    """function(root, ...) of a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return list(function(Path(folder), *arguments))


class CheckWordsTest(unittest.TestCase):
    def test_beginnings_without_a_subject(self):
        for first in ("Of the last rows.", "Those of keys.", "The same, of states.", "What a caller gives.",
                      "Whether it is packed.", "Where keys are.", "As in Forward.", "Its axes.", "It reads u.",
                      "This one is last.", "And those of values.", "These are kept.", "They end."):
            for path, text in (("heed/core/a.h", f"int a;\n  // {first}\n  // More.\n"), ("tools/a.py", f"# {first}\n"),
                               ("tools/b.py", f'def f():\n    """{first}"""\n')):
                with self.subTest(path=path, first=first):
                    self.assertEqual(len(in_tree(check_words.bad_beginnings, {path: text})), 1)

    def test_sentences_pass(self):
        text = ("// The rows of a task.\n// What follows in a block is not its beginning.\n"
                "int a;  // Of a trailing label.\n// Offsets in bytes.\n// This file.\n\n// The same rows.\n\n"
                "// These rows.\n")
        self.assertEqual(in_tree(check_words.bad_beginnings, {"heed/core/a.h": text, "heed/a.md": "# Of"}), [])

    def test_the_place_is_said(self):
        found = in_tree(check_words.bad_beginnings, {"cli/a.cc": "int a;\n\n// Of a.\n"})
        self.assertEqual(found, [("cli/a.cc", 3, "Of a.")])

    def test_banned_words_in_comments_and_names(self):
        for text in ("// Matrix tiles.", "int matrix_tile;", "kMatrixTiles", "UseMatrixTile(1)", "matrix-tile",
                     "// A matrix\n  // tile."):
            with self.subTest(text=text):
                self.assertEqual(in_tree(check_words.excesses, {"heed/a.cc": text}, 0, {"matrix tile": 0}),
                                 ['"matrix tile": 1 uses, at most 0'])
                self.assertEqual(in_tree(check_words.excesses, {"heed/a.cc": text}, 0, {"matrix tile": 1}), [])

    def test_other_words_pass(self):
        files = {"heed/a.cc": "description blueprint matrix tables sidewalk", "tools/a.py": "ast.walk(x)"}
        self.assertEqual(in_tree(check_words.excesses, files, 0, {"strip": 0, "matrix tile": 0, "walk": 0}), [])

    def test_more_beginnings_than_the_bound(self):
        files = {"heed/a.h": "// Of a.\nint a;\n// Of b.\n"}
        self.assertEqual(len(in_tree(check_words.excesses, files, 1, {})), 1)
        self.assertEqual(in_tree(check_words.excesses, files, 2, {}), [])


if __name__ == "__main__":
    unittest.main()
