// Axes of tables.
#include <algorithm>
#include <string>
#include <string_view>

#include "heed/core/error.h"
#include "heed/mechanism/table_internal.h"

namespace heed::mechanism {

int64_t& AxisSizes::operator[](char letter) {
  switch (letter) {
    case 'B': return B;
    case 'D': return D;
    case 'T': return T;
    case 'N': return N;
    case 'G': return G;
    case 'C': return G;  // channels that are heads
    case 'L': return L;
    case 'H': return H;
    case 'd': return d;
    case 'W': return W;
    case 'w': return w;
    case '2': return two;
    case 'K': return K;
    case 'V': return V;
    case 'M': return M;
    case 'P': return P;
    case 'F': return F;
    default: throw InternalError(std::string("mechanism: no axis ") + letter);
  }
}

const Tensor* Table::Find(Role role) const {
  const auto found = std::ranges::find(tensors, role, &Tensor::role);
  return found == tensors.end() ? nullptr : &*found;
}

Axes ShapeOf(std::string_view axes, const AxisSizes& sizes) {
  Axes shape;
  for (const char letter : axes) shape.Append(sizes[letter]);
  return shape;
}

std::string_view AxesOfRank(std::string_view axes, int rank) {
  while (true) {
    const std::string_view one = axes.substr(0, axes.find('|'));
    if (static_cast<int>(one.size()) == rank) return one;
    if (one.size() == axes.size()) return {};
    axes.remove_prefix(one.size() + 1);
  }
}

}  // namespace heed::mechanism
