"""tools/mutations.py on small snippets and on files of the tree, and tools/mutants.py on small programs."""
import ast
import random
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import mutants  # noqa: E402
from mutants import draw, name_of  # noqa: E402
from mutations import CPP_TOKEN, edits  # noqa: E402


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
                ("x = hn::IfThenElseZero(\n    m, a);", ("mask", "x = (a);")),
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

    def test_edits_of_real_files_apply_and_are_planted(self):
        some = random.Random(1)
        for path in ("heed/engines/recurrence/step-inl.h", "heed/engines/scan/heads-inl.h", "heed/state/pages.cc",
                     "heed/mechanism/recurrent.cc", "heed/simd/convert-inl.h"):
            text = (ROOT / path).read_text()
            comments = {match.group() for match in CPP_TOKEN.finditer(text) if match.group("skip")}
            found = edits(path, text)
            self.assertGreater(len(found), 60, path)
            planted = mutants.plant([mutants.Mutant("", path, text, edit) for edit in found])
            self.assertEqual(planted.count("\n"), text.count("\n"))
            self.assertGreater(planted.count("(0)"), 0.95 * len(found))
            for mutated in (planted, *(edit.apply(text) for edit in some.sample(found, 60))):
                self.assertNotEqual(mutated, text)
                left = brackets(mutated)
                for opening, closing in ("()", "[]", "{}"):
                    self.assertEqual(left.count(opening), left.count(closing))
                kept = {match.group() for match in CPP_TOKEN.finditer(mutated) if match.group("skip")}
                self.assertLessEqual(kept - comments, {'#include "tools/mutant.h"'})
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


class PlantTest(unittest.TestCase):
    def mutants(self, path, text, *which):
        """Mutants of a text by rule and by what they change it into."""
        found = []
        for rule, new in which:
            edit = next(edit for edit in edits(path, text) if edit.rule == rule and new in edit.apply(text))
            found.append(mutants.Mutant(f"{path}:{len(found)}", path, text, edit))
            found[-1].number = len(found)
        return found

    def test_an_expression_holds_the_choice(self):
        for text, rule, mutated, planted in (
                ("if (a < b) f();", "compare", "a <= b", "if ((HeedMutant(1) ? (a <= b) : (a < b))) f();"),
                ("x = a + f(b - 1) * c;", "decrease", "b - 0",
                 "x = a + f((HeedMutant(1) ? (b - 0) : (b - 1))) * c;"),
                ("else x += a + b;", "arithmetic", "x -=", "else (HeedMutant(1) ? (x -= a + b) : (x += a + b));"),
                ("x += y = a ? b : c;", "arithmetic", "x -=",
                 "(HeedMutant(1) ? (x -= y = a ? b : c) : (x += y = a ? b : c));"),
                ("return a < b ? c : d;", "branches", "? d : c",
                 "return (HeedMutant(1) ? (a < b ? d : c) : (a < b ? c : d));"),
                ("T x = std::min(S{1}, // y\n g(z));", "minmax", "max",
                 "T x = (HeedMutant(1) ? (std::max(S{1}, g(z))) : (std::min(S{1}, // y\n g(z))));"),
                ("Move(x, y);", "arguments", "y, x", "(HeedMutant(1) ? (Move(y, x)) : (Move(x, y)));"),
                ("if (a) Move(x);", "statement", "if (a) ;", "if (a) if (HeedMutant(1)) {} else Move(x);")):
            with self.subTest(text=text):
                text = f"// A file.\n\nvoid F() {{\n{text}\n}}\n"
                self.assertIn(planted, mutants.plant(self.mutants("a.cc", text, (rule, mutated))))

    def test_an_expression_of_python_holds_the_choice(self):
        for text, rule, mutated, planted in (
                ("if a < b: f()", "compare", "a <= b", "if ((a <= b) if heed_mutant(1) else (a < b)): f()"),
                ("x = y.any(a[1:2])", "logic", "all", "x = ((y.all) if heed_mutant(1) else (y.any))(a[1:2])"),
                ("x = (a +\n b) * c", "term", "(a)", "x = (((a) if heed_mutant(1) else (a +\n b))) * c"),
                ("f(x, y=1)", "keyword", "f(x, )", "((f(x, )) if heed_mutant(1) else (f(x, y=1)))"),
                ("raise E(\n x)", "statement", "pass", "if not heed_mutant(1): raise E(\n x)"),
                ("if a: raise E", "statement", "pass", "if a: raise E")):  # no syntax has a choice there
            with self.subTest(text=text):
                self.assertEqual(mutants.plant(self.mutants("a.py", text, (rule, mutated))), planted)

    def test_what_does_not_compile_is_dropped(self):
        text = "// A file.\n\nvoid F() {\n  x = a < b;\n}\n"
        mutant, = some = self.mutants("heed/a.cc", text, ("compare", "<="))

        def fail(message):
            output = f"[1/2] Building\nFAILED: a.o\n/x/tree/heed/a.cc:4:7: error: {message}\n"
            self.assertEqual(list(mutants.blamed(output, some)), some)
            mutant.retreat(mutants.blamed(output, some)[mutant])
            return mutants.plant(some)

        self.assertIn("(HeedMutantAtRunTime(1) ? (a <= b) : (a < b));", fail("x is not a constant expression"))
        self.assertEqual(fail("operands to '?:' differ"), text.replace("\n\n", '\n#include "tools/mutant.h"\n'))
        self.assertIsNone(mutant.chooser)

    @unittest.skipUnless(shutil.which("c++"), "no compiler")
    def test_the_environment_chooses_and_a_file_records(self):
        text = """// A program.

#include <cstdio>
constexpr int Twice(int n) { return n + n; }
static_assert(Twice(2) == 4);
int main(int n, char**) {
  int x = 3;
  if (n == 2) x = 9;
  for (int i = 0; i < 2; ++i) x += Twice(i);
  x = n > 5 ? 0 : x;
  std::printf("%d", x);
}
"""
        some = self.mutants("a.cc", text, ("arithmetic", "n - n"), ("increase", "x = 4"), ("increase", "i < 3"),
                            ("increase", "x = 10"), ("arithmetic", "x -="), ("branches", "x : 0"),
                            ("negate", "!(n == 2)"))
        with tempfile.TemporaryDirectory() as folder:
            source, program, reached = (Path(folder) / name for name in ("a.cc", "a", "reached"))
            source.write_text(mutants.plant(some))
            subprocess.run(["c++", "-std=c++20", "-w", "-I", ROOT, source, "-o", program], check=True)
            results = []
            for number in range(8):
                reached.write_bytes(bytes(mutants.REACHED_BYTES))
                environment = {"HEED_MUTANT": str(number), "HEED_MUTANTS_REACHED": str(reached)}
                results.append(subprocess.run([program], env=environment, capture_output=True, check=True).stdout)
            self.assertEqual(results, [b"5", b"3", b"6", b"9", b"5", b"1", b"0", b"11"])
            self.assertEqual(reached.read_bytes()[:9], bytes([0, 1, 1, 1, 1, 1, 1, 1, 0]))  # of x = 9, which 7 reaches


class BenchTest(unittest.TestCase):
    def test_chunks_that_reach_a_mutant_run_and_the_quickest_first(self):
        bench = mutants.Bench.__new__(mutants.Bench)
        with tempfile.TemporaryDirectory() as folder:
            bench.tree = bench.build = Path(folder)
            bench.programs, bench.python_tests = ["some_test"], []
            (bench.tree / "python/heed").mkdir(parents=True)
            (bench.build / "bin").mkdir()
            program = bench.build / "bin/some_test"
            program.write_text("""#!/bin/sh
[ "$1" != --gtest_list_tests ] || printf 'A.\\n  One\\n  DISABLED_Two\\nB/0.  # TypeParam = int\\n  Three  # 1\\n'
[ "$GTEST_FILTER$HEED_MUTANT" = B/0.Three1 ] && echo '[  FAILED  ] B/0.Three, where' && exit 1
[ "$GTEST_FILTER$HEED_MUTANT" != B/0.Three4 ] || kill -SEGV $$
""")
            program.chmod(0o755)
            one, three = mutants.Chunk("some_test", ("A.One",)), mutants.Chunk("some_test", ("B/0.Three",))
            self.assertEqual(bench.chunks(), [one, three])
            bench.seconds, bench.reached = {three: 2, one: 1}, {three: {1, 4}, one: {1, 3}}
            text = "// A file.\n\nint x = a < b;\n"
            outcomes = []
            for number in range(1, 6):
                mutant = mutants.Mutant("a", "a.cc", text, edits("a.cc", text)[0])
                mutant.number, mutant.chooser = number, "HeedMutantAtRunTime" if number == 5 else "HeedMutant"
                outcomes.append(bench.try_mutant(mutant, None)[1:])
            self.assertEqual(outcomes, [("killed", "some_test: B/0.Three"), ("survived", "not reached"),
                                        ("survived", "reached by 1 chunks"),
                                        ("killed", "some_test: SIGSEGV, B/0.Three"), ("constant", "")])
            mutant.number = 1
            self.assertEqual(bench.try_mutant(mutant, 0.5)[1:], ("survived", "the first 1 of 2 chunks that reach it"))

    def test_tests_and_references_are_left_alone(self):
        for pattern in ("heed/ops/delta/kda", "heed/mechanism", "python"):
            for name in mutants.mutants_of([pattern]):
                self.assertNotRegex(name, r"_(test|case|reference)\.|/tests/|/reference/")


if __name__ == "__main__":
    unittest.main()
