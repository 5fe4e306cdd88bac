// The offsets of the elements of a tensor that one token of one head has.
#include "heed/mechanism/reference/readable_reference_internal.h"

#include <algorithm>
#include <string>

namespace heed::mechanism {
namespace {

// The form of "BGNT|BNT|DN" that has a tensor's rank, or the first where the tensor is absent.
std::string_view FormOf(std::string_view axes, const ConstTensorView& t) {
  while (true) {
    const size_t end = axes.find('|');
    const std::string_view form = axes.substr(0, end);
    if (!t.present() || form.size() == static_cast<size_t>(t.rank())) return form;
    if (end == std::string_view::npos) {
      RequireRank(t, form.size());
      return form;
    }
    axes.remove_prefix(end + 1);
  }
}

}  // namespace

void AxisLengths::Add(const char* axes, const ConstTensorView& t) {
  const std::string_view form = FormOf(axes, t);
  RequireRank(t, form.size());
  for (size_t axis = 0; axis < form.size(); ++axis) {
    int64_t& length = lengths_[static_cast<size_t>(form[axis])];
    const int64_t size = t.size(static_cast<int>(axis));
    if (length >= 0 && length != size) {
      throw InvalidArgument("reference: a tensor has shape " + t.ShapeString() + ", expected " +
                            std::to_string(length) + " for axis " + form[axis]);
    }
    length = size;
  }
}

int64_t AxisLengths::of(char axis) const {
  if (axis == '2') return 2;
  if (axis == 'w') return of('W') - 1;
  if (axis == 'F' && !has(axis)) return of('K');
  if (!has(axis)) throw InvalidArgument(std::string("reference: no tensor says how long axis ") + axis + " is");
  return lengths_[static_cast<size_t>(axis)];
}

TokenRow::TokenRow(const char* axes, const ConstTensorView& t, const AxisLengths& lengths, char heads,
                   char shared_heads, const ReadableHead& head, bool of_state, double otherwise)
    : offsets_(1, 0), otherwise_(otherwise) {
  const std::string_view form = FormOf(axes, t);
  for (size_t axis = 0; axis < form.size(); ++axis) {
    const int64_t stride = t.present() ? t.stride(static_cast<int>(axis)) : 0;
    const char letter = form[axis];
    if (letter == 'B') {
      base_ += stride * (of_state ? head.sequence : head.batch);
    } else if (letter == 'T') {
      token_stride_ = stride;
      over_tokens_ = t.present();
    } else if (letter == heads) {
      base_ += stride * head.head;
    } else if (letter == shared_heads) {
      base_ += stride * head.shared_head;
    } else {
      int64_t length = lengths.of(letter);
      if (t.present() && t.size(static_cast<int>(axis)) != length) {
        throw InvalidArgument("reference: a tensor has shape " + t.ShapeString() + ", expected " +
                              std::to_string(length) + " for axis " + letter);
      }
      if (letter == 'D') {  // the channels of all heads, of which this head has a part
        length /= lengths.of(heads);
        base_ += stride * head.head * length;
      }
      std::vector<int64_t> more;
      for (const int64_t offset : offsets_) {
        for (int64_t i = 0; i < length; ++i) more.push_back(offset + i * stride);
      }
      offsets_ = std::move(more);
      columns_ = static_cast<size_t>(length);
    }
  }
}

ReadableCall::ReadableCall(const ReadableForm& of, const Table& tensors, const Arguments& arguments,
                           const Results& results)
    : form(of), table(tensors), in(arguments), out(results) {
  for (size_t i = 0; i < table.tensors.size(); ++i) {
    const ConstTensorView& t = mechanism::At(in.tensors, i);
    if (t.present() || !table.tensors[i].optional) lengths.Add(table.tensors[i].axes, t);
  }
}

std::vector<ReadableHead> ReadableCall::Heads(const std::vector<ReferenceSequence>& sequences, bool reverse) const {
  std::vector<ReadableHead> heads;
  const int64_t count = lengths.of(form.heads);
  const int64_t shared = form.shared_heads != 0 && lengths.has(form.shared_heads) ? lengths.of(form.shared_heads) : 1;
  if (shared < 1 || count % shared != 0) throw InvalidArgument("reference: heads are not divided by those they share");
  for (size_t i = 0; i < sequences.size(); ++i) {
    ReadableHead head = {static_cast<int64_t>(i), sequences[i].batch, 0, 0, {}};
    for (int64_t t = sequences[i].begin; t < sequences[i].end; ++t) head.tokens.push_back(t);
    if (reverse) std::reverse(head.tokens.begin(), head.tokens.end());
    for (; head.head < count; ++head.head) {
      head.shared_head = head.head / (count / shared);
      heads.push_back(head);
    }
  }
  return heads;
}

}  // namespace heed::mechanism
