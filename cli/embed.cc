// heed embed: one vector per sequence of token ids, of a model of a folder.
#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"
#include "heed/model/model.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "F is a text file: one sequence per line, token ids apart by commas or blanks. FOLDER is as Transformers or\n"
    "sentence-transformers saves it; modules.json there says whether a vector is the mean of the tokens' hidden states "
    "or the\n"
    "first of them, and whether it has unit length. Without -o vectors are printed, one per line.\n\n"
    "Example:\n  heed embed FOLDER --ids sentences.txt -o embeddings.npy";

struct EmbedCall {
  std::string folder, ids, out, batch;
  bool json = false;
  MachineOptions machine;
};

void Embed(const EmbedCall& call) {
  CheckOut("-o", call.out);
  const int64_t batch = ParseInteger("--batch", call.batch, 1, int64_t{1} << 20, 32);
  if (call.out == call.ids) BadOption("-o", call.out, "another file than the input");
  Context ctx(call.machine.Threads());
  call.machine.Apply(ctx);
  Sequences sequences = ReadIds(call.ids);
  Progress("reading " + call.folder);
  const Model model = Model::Open(call.folder);
  // Sequences of like lengths go together: less padding.
  std::vector<size_t> order(sequences.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return sequences[i].size(); });
  const int64_t count = std::ssize(sequences), width = model.width();
  std::vector<float> vectors(static_cast<size_t>(count * width));
  double seconds = 0;
  {
    Countdown countdown(static_cast<size_t>((count + batch - 1) / batch));
    for (int64_t begin = 0; begin < count; begin += batch) {
      countdown.Next("sequences");
      Sequences some;
      for (int64_t i = begin; i < std::min(count, begin + batch); ++i)
        some.push_back(sequences[order[static_cast<size_t>(i)]]);
      const Padded padded(some);
      std::vector<float> of(some.size() * static_cast<size_t>(width));
      const auto start = std::chrono::steady_clock::now();
      model.Embed(ctx, padded.ids, padded.lengths, TensorView(of.data(), DType::kF32, {std::ssize(some), width}));
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      for (size_t i = 0; i < some.size(); ++i) {
        std::copy_n(of.begin() + static_cast<int64_t>(i) * width, width,
                    vectors.begin() + static_cast<int64_t>(order[static_cast<size_t>(begin) + i]) * width);
      }
    }
  }
  Json output = nullptr, rows = nullptr;
  if (!call.out.empty()) {
    output = WriteOut(call.out, "embeddings", ConstTensorView(vectors.data(), DType::kF32, {count, width}));
  } else if (call.json) {
    rows = Json::array();
    for (int64_t b = 0; b < count; ++b)
      rows.push_back(std::vector<float>(vectors.begin() + b * width, vectors.begin() + (b + 1) * width));
  }
  if (call.json) {
    return PrintJson(Json{{"folder", call.folder},
                          {"family", model.family()},
                          {"sequences", count},
                          {"width", width},
                          {"seconds", seconds},
                          {"embeddings", rows},
                          {"output", output}});
  }
  std::string text;
  if (call.out.empty()) {
    for (int64_t b = 0; b < count; ++b) {
      text += Format("{}\n", fmt::join(vectors.begin() + b * width, vectors.begin() + (b + 1) * width, " "));
    }
  } else {
    text = Format("{} vectors of {} numbers in {}, {}\n", count, width, call.out, Seconds(seconds));
  }
  Print(text);
}

}  // namespace

void AddEmbed(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "embed", "one vector per sequence of token ids, of a model of a folder", kFooter);
  const auto call = std::make_shared<EmbedCall>();
  AddText(verb, "FOLDER", call->folder, "a model as Transformers saves it", "", Need::kRequired);
  AddText(verb, "--ids", call->ids, "a text file of token ids, one sequence per line", "F", Need::kRequired);
  AddText(verb, "-o,--output", call->out, "writes the vectors (.safetensors or .npy)", "OUT");
  AddText(verb, "--batch", call->batch, "sequences at a time; default 32", "N");
  call->machine.Register(verb);
  AddFlag(verb, "--json", call->json, "one JSON document");
  OnChosen(verb, [call] { Embed(*call); });
}

}  // namespace heed::cli
