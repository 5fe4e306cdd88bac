// heed embed: one vector per sequence of token ids, of a model of a folder.
#include <chrono>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cli/format.h"
#include "cli/model_call.h"
#include "cli/options.h"
#include "cli/print.h"
#include "cli/token_ids.h"
#include "cli/verbs.h"

namespace heed::cli {
namespace {

constexpr char kFooter[] =
    "F is a text file: one sequence per line, token ids apart by commas or blanks. FOLDER is as Transformers or\n"
    "sentence-transformers saves it; modules.json there says whether a vector is the mean of the tokens' hidden states "
    "or the\n"
    "first of them, and whether it has unit length. Without -o vectors are printed, one per line.\n\n"
    "Example:\n  heed embed FOLDER --ids sentences.txt -o embeddings.npy";

struct EmbedCall : ModelCall {
  std::string ids, out, batch;
};

void Embed(const EmbedCall& call) {
  CheckOut("-o", call.out);
  const int64_t batch = ParseInteger("--batch", call.batch, 1, int64_t{1} << 20, 32);
  if (call.out == call.ids) BadOption("-o", call.out, "another file than the input");
  Context ctx(call.machine.Threads());
  call.machine.Apply(ctx);
  Sequences sequences = ReadIds(call.ids);
  const Model model = call.Open();
  // Sequences of like lengths go together: less padding.
  std::vector<size_t> order(sequences.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) { return sequences[i].size(); });
  const int64_t count = std::ssize(sequences), width = model.width();
  std::vector<std::vector<float>> rows(sequences.size());
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
      for (int64_t i = 0; i < std::ssize(some); ++i) {
        rows[order[static_cast<size_t>(begin + i)]].assign(of.begin() + i * width, of.begin() + (i + 1) * width);
      }
    }
  }
  Json own = {{"sequences", count}, {"width", width}, {"embeddings", nullptr}, {"output", nullptr}};
  if (call.out.empty()) {
    if (call.json) own["embeddings"] = rows;
    return call.Print(model, seconds, own, call.json ? "" : Lines(rows, " "));
  }
  std::vector<float> all;
  for (const std::vector<float>& row : rows) all.insert(all.end(), row.begin(), row.end());
  own["output"] = WriteOut(call.out, "embeddings", ConstTensorView(all.data(), DType::kF32, {count, width}));
  call.Print(model, seconds, own,
             Format("{} vectors of {} numbers in {}, {}\n", count, width, call.out, Seconds(seconds)));
}

}  // namespace

void AddEmbed(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "embed", "one vector per sequence of token ids, of a model of a folder", kFooter);
  const auto call = std::make_shared<EmbedCall>();
  call->RegisterFolder(verb);
  AddText(verb, "--ids", call->ids, "a text file of token ids, one sequence per line", "F", Need::kRequired);
  AddText(verb, "-o,--output", call->out, "writes the vectors (.safetensors or .npy)", "OUT");
  AddText(verb, "--batch", call->batch, "sequences at a time; default 32", "N");
  call->RegisterRest(verb);
  OnChosen(verb, [call] { Embed(*call); });
}

}  // namespace heed::cli
