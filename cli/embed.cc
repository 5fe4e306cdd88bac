// heed embed: one vector per sequence of token ids, from a model in a folder.
#include <algorithm>
#include <chrono>
#include <memory>
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
    "F is a text file: one sequence per line, token ids separated by commas or blanks. FOLDER has the format of\n"
    "Transformers or sentence-transformers; modules.json there says whether a vector is the mean of the tokens' hidden "
    "states "
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
  const Sequences sequences = ReadIds(call.ids);
  const Model model = call.Open();
  const int64_t count = std::ssize(sequences), width = model.width();
  std::vector<float> all(static_cast<size_t>(count * width));
  double seconds = 0;
  {
    Countdown countdown(static_cast<size_t>((count + batch - 1) / batch));
    for (int64_t begin = 0; begin < count; begin += batch) {
      countdown.Next("sequences");
      const int64_t end = std::min(count, begin + batch);
      const Padded padded(Sequences(sequences.begin() + begin, sequences.begin() + end));
      const auto start = std::chrono::steady_clock::now();
      model.Embed(ctx, padded.ids, padded.lengths,
                  TensorView(all.data() + begin * width, DType::kF32, {end - begin, width}));
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
  }
  Json own = {{"sequences", count}, {"width", width}, {"embeddings", nullptr}, {"output", nullptr}};
  if (call.out.empty()) {
    std::vector<std::vector<float>> rows;
    for (auto row = all.begin(); row != all.end(); row += width) rows.emplace_back(row, row + width);
    if (call.json) own["embeddings"] = rows;
    return call.Print(model, seconds, own, call.json ? "" : Lines(rows, " "));
  }
  own["output"] = WriteOut(call.out, "embeddings", ConstTensorView(all.data(), DType::kF32, {count, width}));
  call.Print(model, seconds, own,
             Format("{} vectors of {} numbers in {}, {}\n", count, width, call.out, Seconds(seconds)));
}

}  // namespace

void AddEmbed(CLI::App& app) {
  CLI::App& verb = AddVerb(app, "embed", "one vector per sequence of token ids, by a model from a folder", kFooter);
  const auto call = std::make_shared<EmbedCall>();
  call->RegisterFolder(verb);
  AddText(verb, "--ids", call->ids, "a text file of token ids, one sequence per line", "F", Need::kRequired);
  AddText(verb, "-o,--output", call->out, "writes the vectors (.safetensors or .npy)", "OUT");
  AddText(verb, "--batch", call->batch, "sequences at a time; default 32", "N");
  call->RegisterRest(verb);
  OnChosen(verb, [call] { Embed(*call); });
}

}  // namespace heed::cli
