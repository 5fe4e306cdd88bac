"""Each rule of tools/check_layering.py finds its violation, and a clean tree passes. Needs no third-party package."""
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from check_layering import check_tree


def messages(files):
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            file = Path(folder) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [f"{path}:{line}: {what}" for path, line, what in check_tree(Path(folder))]


def c(body):
    """A source file: the comment that every file begins with, then body."""
    return "// A file.\n" + body + "\n"


class CheckLayeringTest(unittest.TestCase):
    def assert_one(self, files, expected):
        found = messages(files)
        self.assertEqual(len(found), 1, found)
        self.assertIn(expected, found[0])

    def test_a_clean_tree_passes(self):
        self.assertEqual(messages({
            "heed/core/a.h": c("#include <vector>\n// printf( in a comment, \"abort()\" in a string"),
            "heed/core/os.cc": c("#include <sys/mman.h>\n#include <unistd.h>"),
            "heed/core/b.cc": c('const char* e = std::getenv("HEED_ISA"); snprintf(b, 9, "abort() printf(");'),
            "heed/engines/softmax/k.cc": c('#define HWY_TARGET_INCLUDE "heed/engines/softmax/k.cc"\n#include '
                                           '"hwy/highway.h"'),
            "heed/ops/exact/a/a.cc": c('#include "heed/ops/exact/common/c.h"\n#include '
                                       '"heed/ops/positions/alibi.h"\nHWY_DASSERT(x);'),
            "heed/ops/exact/a/a_case.cc": c('#include "heed/harness/case.h"'),
            "heed/ops/exact/a/a_test.cc": c('#include "heed/ops/gated/b/b.h"\n#include <sys/wait.h>\nprintf("x");'),
            "heed/ops/exact/a/a_py.cc": c('#include "nanobind/nanobind.h"'),
            "heed/ops/exact/a/part/b.cc": c('#include "heed/ops/exact/a/a.h"\n#include "heed/state/kv_view.h"'),
            "cli/main.cc": c('#include "heed/harness/case.h"\nprintf("x");'),
            "heed/cuda/a.h": c("#include <cuda_runtime.h>"),
            "heed/engines/scan/a.cu": c("#include <cuda_runtime.h>"),
            "tools/t.py": "#!/usr/bin/env python3\n",
        }), [])

    def test_one_type_has_two_definitions(self):
        block = "namespace heed::a::HWY_NAMESPACE {\ntemplate <class T>\nstruct Block {\n  T x;\n};\n}  // namespace"
        mine = block.replace("heed::a::HWY_NAMESPACE {", "heed::a {\nnamespace {")
        files = {"heed/ops/exact/a/a.cc": c(block), "heed/ops/exact/a/b.cc": c(block)}
        self.assert_one(files, "heed::a::HWY_NAMESPACE::Block is another type in heed/ops/exact/a/a.cc")
        for other in (mine, block.replace("::a::", "::b::"), block.replace("Block {", "Block;")):
            self.assertEqual(messages({**files, "heed/ops/exact/a/b.cc": c(other)}), [])

    def test_a_lower_rank_includes_a_higher(self):
        for path, name in (("heed/core/a.cc", "heed/simd/b-inl.h"), ("heed/simd/a-inl.h", "heed/engines/scan/b.h"),
                           ("heed/io/a.cc", "heed/engines/scan/b.h"), ("heed/engines/scan/a.cc", "heed/ops/ssm/b/b.h"),
                           ("heed/mechanism/a.cc", "heed/ops/ssm/b/b.h"),
                           ("heed/ops/positions/a.cc", "heed/ops/ssm/b/b.h"),
                           ("heed/patterns/a.cc", "heed/ops/exact/a/a.h"),
                           ("heed/state/a.cc", "heed/ops/exact/a/a.h"),
                           ("heed/ops/ssm/common/a.cc", "heed/ops/ssm/b/b.h"),
                           ("heed/ops/ssm/b/b.cc", "heed/layers/a.h"), ("heed/layers/a.cc", "heed/harness/case.h"),
                           ("heed/ops/ssm/b/b.cc", "heed/harness/case.h"), ("heed/harness/a.cc", "heed/pages/a.h"),
                           ("heed/pages/a.cc", "cli/a.h"), ("heed/ops/ssm/b/b_case.cc", "tests/a.h")):
            with self.subTest(path=path, name=name):
                self.assert_one({path: c(f'#include "{name}"')}, f"includes {name} of rank")

    def test_a_cuda_header_elsewhere(self):
        for path in ("heed/engines/scan/a.cc", "heed/core/a.cc", "tests/a_test.cc"):
            self.assert_one({path: c("#include <cuda_runtime.h>")}, "CUDA header <cuda_runtime.h> outside")

    def test_mpi_elsewhere(self):
        for path in ("heed/distributed/group.cc", "heed/core/a.cc", "examples/a.cc"):
            self.assert_one({path: c("#include <mpi.h>")}, "<mpi.h> outside heed/distributed/mpi.h")
        self.assertEqual(messages({"heed/distributed/mpi.h": c("#include <mpi.h>")}), [])

    def test_an_operation_includes_another(self):
        for path in ("heed/ops/exact/a/a.cc", "heed/ops/exact/a/a_case.cc"):
            self.assert_one({path: c('#include "heed/ops/exact/b/b.h"')}, "an operation includes another")

    def test_only_sparse_operations_are_calls_of_attention(self):
        attention = c('#include "heed/ops/exact/attention/attention.h"')
        self.assertEqual(messages({"heed/ops/sparse/a/a.cc": attention}), [])
        self.assert_one({"heed/ops/linear/a/a.cc": attention}, "an operation includes another")
        self.assert_one({"heed/ops/sparse/a/a.cc": c('#include "heed/ops/exact/b/b.h"')},
                        "an operation includes another")

    def test_a_reference_reads_what_kernels_run_with(self):
        for text in ("f(DefinitionOf(options));", "void F(const Definition& d);", "StateTensors(d);", "f(kDefinition);",
                     "RangesOf(op);"):
            self.assert_one({"heed/ops/ssm/b/b_reference.cc": c(text)}, "a reference reads what kernels run with")
            self.assert_one({"heed/mechanism/a_reference_internal.h": c(text)},
                            "a reference reads what kernels run with")
            self.assertEqual(messages({"heed/ops/ssm/b/b.cc": c(text)}), [])

    def test_printing(self):
        for text in ('printf("x");', "std::cout << 1;", "std::cerr << 1;", 'std::fprintf(f, "x");', 'fmt::print("x");',
                     "puts(x);"):
            self.assert_one({"heed/core/a.cc": c(text)}, "prints")

    def test_ending_the_process(self):
        for text in ("abort();", "std::abort();", "HWY_ASSERT(x);", "HWY_ABORT(x);", "std::terminate();", "exit(1);"):
            self.assert_one({"heed/io/a.cc": c(text)}, "ends the process")

    def test_reading_the_environment(self):
        self.assert_one({"heed/core/a.cc": c('getenv("HOME");')}, "reads the environment: HOME")
        self.assert_one({"heed/core/a.cc": c('getenv("HEED_ISA");'), "heed/core/b.cc": c('getenv("HEED_ISA");')},
                        "in one file")
        self.assertEqual(messages({"heed/core/a.cc": c('getenv("HEED_ISA");'),
                                   "heed/distributed/b.cc": c('getenv("HEED_DISTRIBUTED_CHECKS");')}), [])

    def test_operating_system_headers(self):
        for name in ("sys/mman.h", "unistd.h", "fcntl.h", "pthread.h", "sched.h", "windows.h", "linux/futex.h",
                     "cpuid.h"):
            self.assert_one({"heed/core/a.cc": c(f"#include <{name}>")}, f"operating system header <{name}>")

    def test_python_in_the_library(self):
        self.assert_one({"heed/engines/scan/a.cc": c("#include <nanobind/nanobind.h>")}, "only *_py.cc knows Python")

    def test_third_party_in_a_public_header(self):
        for path in ("heed/heed.h", "heed/core/a.h", "heed/io/a.h", "heed/ops/positions/a.h", "heed/ops/exact/a/a.h"):
            for name in ('"hwy/base.h"', "<fmt/format.h>", "<nlohmann/json.hpp>"):
                self.assert_one({path: c(f"#include {name}")}, "third-party include")

    def test_target_include_of_another_file(self):
        self.assert_one({"heed/engines/scan/a.cc": c('#define HWY_TARGET_INCLUDE "heed/engines/scan/b.cc"')},
                        "not this file")

    def test_form(self):
        self.assert_one({"heed/core/a.h": c("// caf\u00e9")}, "not ASCII")
        self.assert_one({"tools/a.py": "# caf\u00e9\n"}, "not ASCII")
        self.assert_one({"heed/core/a.h": "#ifndef A\n"}, "first line")
        self.assert_one({"python/heed/a.py": "import sys\n"}, "first line")
        self.assert_one({"heed/core/a.cc": c("\n" * 600)}, "longer than 600 lines")
        self.assert_one({"heed/core/a.h": c("// " + 118 * "a")}, "longer than 120 columns")
        self.assert_one({"tools/a.py": "# " + 119 * "a" + "\n"}, "longer than 120 columns")


if __name__ == "__main__":
    unittest.main()
