// heed.view: the page of `heed view` for arrays, in a notebook.
#include "python/view.h"

#include <string>
#include <utility>
#include <vector>

#include "heed/ops/exact/attention/attention_call_py.h"
#include "heed/ops/exact/attention/attention_options_py.h"
#include "heed/pages/page.h"
#include "heed/pages/view_page.h"
#include "python/arguments.h"
#include "python/caches/kv_cache_py.h"
#include "python/docstring.h"
#include "python/runtime.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

constexpr char kOp[] = "view";
constexpr int64_t kHeight = 900, kMaxHeight = 100000;

constexpr char kText[] =
    "The attention of q and k as a page: every head as a map, with its numbers, search\n"
    "for tokens, heads in several orders, and the shown map as a file. In a notebook the result\n"
    "is shown where it is the last value of a cell; elsewhere save() writes it.\n"
    "\n"
    "The page is that of `heed view`: one file that needs no other and no network. Of several\n"
    "sequences it shows the first. Up to 2048 tokens, and 6 MB, every pair has its own cell,\n"
    "beyond that cells hold several. With `pattern` the maps are those of attention without it,\n"
    "and pairs that it does not keep are shaded; beside `mask`, `bias` and other options than `scale`,\n"
    "`causal`, `window`, `softcap` and `align` it counts as one of them. Weights are those\n"
    "before dropout.\n"
    "\n"
    "Raises InvalidArgument as heed.attention does, for tokens that are no strings or not one per\n"
    "key, and for more heads than one page can have.";

constexpr Said kViewArguments[] = {
    {"q", "[B, Tq, Hq, D]: queries, at least one"},
    {"k", "[B, Tk, Hkv, D]: keys, at least one"},
    {"tokens", "a sequence of strings, one per key: labels; None: positions"},
    {"options",
     "the other keywords of heed.attention, as they are there, but those of packed "
     "sequences, out and return_lse"},
};

constexpr char kInPython[] = R"(
Returns a heed.View.

Example:

  >>> import heed, numpy as np
  >>> rng = np.random.default_rng(0)
  >>> q, k = rng.standard_normal((2, 1, 4, 2, 16), np.float32)
  >>> page = heed.view(q, k, tokens=["a", "page", "of", "attention"], causal=True)
  >>> page.html.startswith("<!DOCTYPE html>")
  True)";

constexpr char kViewSignature[] =
    "def view(q: Array, k: Array, *, tokens: collections.abc.Sequence[str] | None = None, **options) -> View";

constexpr char kClassText[] =
    "A page of attention that heed.view made. A notebook shows it in a frame of its own, in which\n"
    "the page can run its scripts and save files, and reach nothing of the notebook.";

constexpr char kSaveSignature[] = "def save(self, path: Path) -> None";
constexpr Said kSaveArguments[] = {{"path", "of the .html file, which appears complete or not at all"}};

struct View {
  std::string html;
  int64_t height = kHeight;
};

// A string that may contain lone surrogates, which are not valid text: the page replaces them.
std::string ToUtf8(nb::handle text) {
  const nb::bytes bytes = nb::steal<nb::bytes>(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "surrogatepass"));
  if (!bytes.is_valid()) throw nb::python_error();
  return {bytes.c_str(), bytes.size()};
}

Json ToLabels(const Argument& argument, int64_t num_keys) {
  const nb::handle tokens = argument.value;
  const std::string expected = "a sequence of " + std::to_string(num_keys) + " strings, one per key";
  if (PyUnicode_Check(tokens.ptr()) || PyBytes_Check(tokens.ptr()) || !PySequence_Check(tokens.ptr())) {
    Fail(argument, expected);
  }
  const nb::list list = nb::steal<nb::list>(PySequence_List(tokens.ptr()));
  if (!list.is_valid()) throw nb::python_error();
  if (static_cast<int64_t>(list.size()) != num_keys) {
    Fail(argument.operation, argument.name, "has " + std::to_string(list.size()) + " elements", expected);
  }
  std::vector<std::string> words;
  for (const nb::handle word : list) {
    const std::string name = std::string(argument.name) + "[" + std::to_string(words.size()) + "]";
    if (!PyUnicode_Check(word.ptr())) Fail({argument.operation, name.c_str(), word}, "a string");
    words.push_back(ToUtf8(word));
  }
  return pages::Labels(words);
}

pages::ViewLayer LayerOf(const attention::Call& call) {
  const ConstTensorView &q = call.in.q, &k = call.in.k;
  for (const auto& [name, x] : {std::pair{"q", q}, {"k", k}}) {
    if (x.size(0) == 0 || x.size(1) == 0 || x.size(2) == 0) {
      Fail(kOp, name, "has shape " + x.ShapeString(), "at least one sequence, token and head");
    }
  }
  if (call.options.cu_seqlens_q.present() || call.options.cu_seqlens_k.present()) {
    Fail(kOp, "cu_seqlens_q", "is given", "padded sequences");
  }
  pages::ViewLayer layer = {"", q, k, call.options, nullptr, {}, {}};
  for (int64_t head = 0; head < q.size(2); ++head) layer.heads.push_back(head);
  if (call.tokens.is_valid()) {
    layer.labels = ToLabels({kOp, "tokens", call.tokens}, k.size(1));
  } else {
    layer.notes.push_back("no tokens: labels are positions");
  }
  return layer;
}

View MakeView(const nb::args& args, const nb::kwargs& kwargs) {
  constexpr const char* kMore[] = {"tokens"};
  attention::Call call;
  attention::ReadWeightsCall(kOp, kMore, args.ptr(), kwargs.ptr(), call);
  const pages::ViewLayer layer = LayerOf(call);
  pages::ViewSubject subject;
  subject.title = "heed.view";
  subject.layer = [&](size_t) { return layer; };
  Context& ctx = ThreadContext(call.num_threads);
  pages::ViewPage page;
  Compute(kOp, [&] { page = pages::ComposeView(ctx, subject); });
  if (page.html.empty()) {
    Fail(kOp, "q", "has " + std::to_string(page.all_heads) + " heads", "fewer in one page");
  }
  return {std::move(page.html)};
}

// The frame has no origin, so that the page's scripts cannot access anything outside.
std::string Frame(const View& view) {
  return "<iframe title=\"Attention\" sandbox=\"allow-scripts allow-downloads\" style=\"width: 100%; height: " +
         std::to_string(view.height) + "px; border: 0; resize: vertical\" srcdoc=\"" + pages::EscapeHtml(view.html) +
         "\"></iframe>";
}

void Save(const View& view, nb::handle path) {
  const std::string file = ToPath({"View.save", "path", path});
  const GilReleased released;
  pages::WriteText(file, view.html);
}

void SetHeight(View& view, nb::handle height) { view.height = ToInt({"View", "height", height}, 1, kMaxHeight); }

}  // namespace

void BindView(nb::module_& m) {
  nb::class_<View>(m, "View", kClassText)
      .def_prop_ro(
          "html", [](const View& view) { return nb::str(view.html.c_str(), view.html.size()); },
          nb::sig("def html(self) -> str"), "The page, all of it in ASCII.")
      .def_prop_rw(
          "height", [](const View& view) { return view.height; }, &SetHeight, nb::for_setter(nb::arg("height").none()),
          nb::for_getter(nb::sig("def height(self) -> int")),
          nb::for_setter(nb::sig("def height(self, height: int, /) -> None")),
          "Of the frame in a notebook, in pixels; 900 at first. Its corner can be dragged.")
      .def("save", &Save, "path"_a.none(), nb::sig(kSaveSignature),
           Docstring("Writes the page. Raises FileError.", kSaveSignature, {kSaveArguments}).c_str())
      .def("_repr_html_", &Frame, nb::sig("def _repr_html_(self) -> str"));
  const char* const signature = attention::Spelled(kViewSignature, &attention::TakesPadded, attention::kThreads);
  m.def("view", &MakeView, nb::sig(signature), Docstring(kText, kViewSignature, {kViewArguments}, kInPython).c_str());
}

}  // namespace heed::python
