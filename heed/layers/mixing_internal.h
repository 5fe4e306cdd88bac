// The table of GatedMixing: the arguments of each mechanism.
#ifndef HEED_LAYERS_MIXING_INTERNAL_H_
#define HEED_LAYERS_MIXING_INTERNAL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace heed::layers {

// The function applied to an argument. All but the first have a bias.
enum class ArgumentMap { kNone, kBiased, kLogSigmoid, kSigmoid };

// RWKV-7 removes this share of the value that is stored under its key: its own arguments are a and b.
inline constexpr std::string_view kShare = "share";

struct MixingArgument {
  enum Size { kKey, kValue, kHead };  // numbers per head

  std::string_view name;
  Size size;
  ArgumentMap map = ArgumentMap::kNone;
  bool constant = false;  // given by the bias alone
  bool rotated = false;   // rotated by position
  bool unit = false;      // normalised to norm 1

  bool has_bias() const { return constant || map != ArgumentMap::kNone; }
  int64_t PerHead(int64_t key_dim, int64_t value_dim) const {
    return size == kKey ? key_dim : size == kValue ? value_dim : 1;
  }
};

struct MixingMechanism {
  std::string_view name;  // a recurrence, "attention" or "none"
  std::vector<MixingArgument> arguments;

  bool is_attention() const { return name == "attention"; }
  bool is_recurrence() const { return !is_attention() && name != "none"; }
};

// Throws InvalidArgument that lists the names for an unknown one.
const MixingMechanism& MixingMechanismNamed(const std::string& layer, std::string_view name);

}  // namespace heed::layers

#endif  // HEED_LAYERS_MIXING_INTERNAL_H_
