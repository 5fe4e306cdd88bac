"""The rules of tools/mutations.py, on small snippets and on files of the tree. It needs the standard library alone."""
import ast
import random
import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402
from mutations import CPP_TOKEN, draw, edits, name_of  # noqa: E402


def changed(path, text):
    """(rule, mutated text) of every candidate."""
    return [(edit.rule, edit.apply(text)) for edit in edits(path, text)]


def brackets(text):
    return [match.group() for match in CPP_TOKEN.finditer(text) if match.group("op") and match.group() in "(){}[]"]


class MutationsTest(unittest.TestCase):
    def assert_yields(self, path, text, expected):
        """Each expected (rule, statement) is among the candidates of a function body."""
        head, tail = ("", "") if path.endswith(".py") else ("void F() {\n", "\n}\n")
        found = changed(path, head + text + tail)
        for rule, mutated in expected:
            self.assertIn((rule, head + mutated + tail), found, f"{rule} of {text}")
        return found

    def test_every_cpp_rule(self):
        for text, *expected in (
                ("if (a < b) f();", ("compare", "if (a <= b) f();"), ("bound_up", "if (a < 1 + b) f();"),
                 ("bound_down", "if (a < -1 + b) f();"), ("negate", "if (!(a < b)) f();"),
                 ("statement", "if (a < b) ;")),
                ("x = hn::Lt(a, b);", ("compare", "x = hn::Le(a, b);"), ("arguments", "x = hn::Lt(b, a);")),
                ("x = a == b && !c;", ("compare", "x = a != b && !c;"), ("logic", "x = a == b || !c;"),
                 ("negate", "x = a == b && c;"), ("term", "x = a == b;"), ("term", "x = !c;")),
                ("x = a - g(b, 1) * c;", ("arithmetic", "x = a + g(b, 1) * c;"), ("arithmetic", "x = a - g(b, 1) / c;"),
                 ("term", "x = a;"), ("term", "x = - g(b, 1) * c;"), ("term", "x = a - g(b, 1);"),
                 ("term", "x = a - c;")),
                ("x += S<int, 8>(y) + z;", ("arithmetic", "x -= S<int, 8>(y) + z;"), ("term", "x += S<int, 8>(y);"),
                 ("term", "x += z;")),
                ("x = c ? f(a, b) : d ? 1 : e;", ("branches", "x = c ? d ? 1 : e : f(a, b);"),
                 ("branches", "x = c ? f(a, b) : d ? e : 1;")),
                ("x = std::min(a, b);", ("minmax", "x = std::max(a, b);")),
                ("x = hn::IfThenElse(m, a, b);", ("mask", "x = (a);")),
                ("x = hn::IfThenElseZero(\n    m, a);", ("mask", "x = (a)\n;")),
                ("x = std::floor(y);", ("rounding", "x = std::ceil(y);")),
                ("x = hn::Round(y);", ("rounding", "x = (y);")),
                ("Move(x, y);", ("arguments", "Move(y, x);"), ("statement", ";")),
                ("x = 2;", ("increase", "x = 3;"), ("decrease", "x = 1;"), ("statement", ";")),
                ("x = 0.5f;", ("increase", "x = (2 * 0.5f);")), ("x = true;", ("constant", "x = false;")),
                ("while (a) { ++b; continue; }", ("statement", "while (a) { ; continue; }"),
                 ("statement", "while (a) { ++b; ; }")),
                ("if (!a) throw Bad(a);", ("statement", "if (!a) ;"), ("negate", "if (!(!a)) throw Bad(a);"))):
            with self.subTest(text=text):
                self.assert_yields("a.cc", text, expected)

    def test_every_python_rule(self):
        for text, *expected in (
                ("if a < b: f()", ("compare", "if a <= b: f()"), ("bound_up", "if a < 1 + b: f()"),
                 ("bound_down", "if a < -1 + b: f()"), ("negate", "if not (a < b): f()"),
                 ("statement", "if a < b: pass")),
                ("x = a is not None and not b", ("compare", "x = a is None and not b"),
                 ("logic", "x = a is not None or not b"), ("negate", "x = a is not None and b"),
                 ("term", "x = a is not None"), ("term", "x = not b")),
                ("x = (a + b) * c", ("arithmetic", "x = (a - b) * c"), ("arithmetic", "x = (a + b) / c"),
                 ("term", "x = (a + b)"), ("term", "x = (a) * c"), ("term", "x = (b) * c")),
                ("x = a if c else b", ("branches", "x = b if c else a")),
                ("x = min(a, b)", ("minmax", "x = max(a, b)")),
                ("f(a, b, c=d)", ("arguments", "f(b, a, c=d)"), ("keyword", "f(a, b, )"), ("statement", "pass")),
                ("x = torch.where(m, a, b)", ("mask", "x = (a)")), ("x = y.to(t)", ("rounding", "x = (y)")),
                ("x = 2", ("increase", "x = 3"), ("decrease", "x = 1")), ("x = True", ("constant", "x = False")),
                ("x.y = z", ("statement", "pass")), ("raise Bad(x)", ("statement", "pass"))):
            with self.subTest(text=text):
                for _, mutated in self.assert_yields("a.py", text, expected):
                    ast.parse(mutated)

    def test_what_is_no_code_stays(self):
        for path, text in (
                ("a.cc", '// a < b\n/* x = 1;\n   f(a, b); */\n#define M(a) (a < 1 && \\\n  2)\n#include <a/b.h>\n'
                         'const char* s = "a < b && 1", c = \'<\', *r = R"x(1 < 2 ")x";\n'),
                ("a.cc", "template <class T, int N = 2>\nstruct S;\nusing X = S<int, 3>;\nstatic_assert(4 == 5);\n"),
                ("a.cc", "std::vector<int> F(const std::map<int, S<3>>& a, T* b, bool operator<(const S& c));\n"),
                ("a.py", '"""a < 1"""\n# x = 1\ns = "a and 2"\nt = f"{a + 1}"\n'),
                ("a.py", 'def f(a: Literal[1]) -> int | None:\n    "x"\n')):
            with self.subTest(text=text):
                self.assertEqual(changed(path, text), [])

    def test_declarations_are_no_statements_and_no_calls(self):
        for text in ("int F(const S& a, T* b);", "struct S {\n  S(int a, int b);\n};", "struct S {\n  int c = x;\n};",
                     "void F() {\n  S<T> a(b);\n  T* c = d;\n  auto e = f;\n}"):
            self.assertEqual(changed("a.cc", text), [])

    def test_edits_of_real_files_apply(self):
        some = random.Random(1)
        for path in ("heed/engines/recurrence/step-inl.h", "heed/engines/scan/heads-inl.h", "heed/state/pages.cc",
                     "heed/mechanism/recurrent.cc", "heed/simd/convert-inl.h"):
            text = (ROOT / path).read_text()
            comments = [match.group() for match in CPP_TOKEN.finditer(text) if match.group("skip")]
            found = edits(path, text)
            self.assertGreater(len(found), 60, path)
            for edit in some.sample(found, 60):
                mutated = edit.apply(text)
                self.assertNotEqual(mutated, text)
                self.assertEqual(mutated.count("\n"), text.count("\n"), edit)
                of_edit = brackets(mutated)
                for pair in ("()", "[]", "{}"):
                    self.assertEqual(of_edit.count(pair[0]), of_edit.count(pair[1]), edit)
                kept = [match.group() for match in CPP_TOKEN.finditer(mutated) if match.group("skip")]
                self.assertTrue(set(kept) <= set(comments), edit)
        for path in sorted((ROOT / "python/heed").glob("*.py")):
            text = path.read_text()
            found = edits(path.name, text)
            for edit in some.sample(found, min(len(found), 60)):
                ast.parse(edit.apply(text))

    def test_names_are_unique_and_the_draw_is_a_seeds(self):
        path = "heed/state/pages.cc"
        text = (ROOT / path).read_text()
        names = [name_of(path, text, edit) for edit in edits(path, text)]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual(draw(names, 1, 20), draw(names[::-1], 1, 20))
        self.assertNotEqual(draw(names, 1, 20), draw(names, 2, 20))
        self.assertEqual(draw(names, 1, 20)[:5], draw(names, 1, 5))
        rules = {name.rpartition(":")[2] for name in names}
        self.assertEqual({name.rpartition(":")[2] for name in draw(names, 1, len(rules))}, rules)
        self.assertEqual(draw([f"a:{i}:1:term" for i in range(6)], 1, 3), ["a:1:1:term", "a:5:1:term", "a:3:1:term"])


class NearTest(unittest.TestCase):
    includes = mutants.Includes()

    def test_tests_near_a_file(self):
        for file, program, test in (
                ("heed/ops/delta/kda/kda.cc", "random_options_test", "*/kda"),
                ("heed/engines/recurrence/step-inl.h", "conformance_test", "*/gla_*"),
                ("heed/state/page_pool.cc", "heed_op_tests", "PagePoolTest.UnitsAreApartAndAligned"),
                ("heed/state/nsa_cache.cc", "heed_op_tests", "NsaAttendTest.TokenByTokenAndInChunksItIsForward"),
                ("heed/engines/scan/cuda/backward_block.h", "cuda_scan_test", "*"),
                ("python/heed/select.py", "pytest", "python/tests/test_select.py"),
                ("python/mechanism/recurrent.cc", "pytest", "python/tests/test_recurrent.py")):
            self.assertIn(test, re.split("[: ]", dict(self.includes.near(file))[program]), file)

    def test_filters_name_tests_that_there_are(self):
        for file, text in self.includes.texts.items():
            if file.endswith("_test.cc"):
                has_tests = re.search(r"^(TYPED_)?TEST", text, re.M) is not None
                self.assertEqual(self.includes.filter_of([file]) != "", has_tests, file)

    def test_tests_and_references_are_left_alone(self):
        for pattern in ("heed/ops/delta/kda", "python"):
            for name in mutants.mutants_of([pattern]):
                self.assertNotRegex(name, r"_(test|case|reference)\.|/tests/")


class SnapshotTest(unittest.TestCase):
    def test_a_build_returns_to_what_it_was(self):
        with tempfile.TemporaryDirectory() as folder:
            bench = mutants.Bench.__new__(mutants.Bench)
            bench.build, bench.keep = Path(folder) / "build", Path(folder) / "clean"
            bench.build.mkdir()
            (bench.build / "a.o").write_text("1")
            bench.remember()
            (bench.build / "a.o").write_text("1")
            self.assertFalse(bench.changes_objects())
            (bench.build / "a.o").write_text("22")
            (bench.build / "b.o").write_text("3")
            self.assertTrue(bench.changes_objects())
            bench.restore()
            self.assertEqual({file.name: file.read_text() for file in bench.build.iterdir()}, {"a.o": "1"})


if __name__ == "__main__":
    unittest.main()
