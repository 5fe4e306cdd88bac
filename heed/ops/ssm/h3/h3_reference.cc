// The reference of H3, in double, a pair of channels at a time.
#include <cstddef>
#include <cstdint>

#include "heed/ops/ssm/h3/h3_reference_internal.h"

namespace heed::h3 {
namespace {

using mechanism::Add;
using mechanism::At;
using mechanism::Put;

Doubles RowOf(const ConstTensorView& x, const ReferenceHead& head, size_t i) {
  Doubles row;
  for (const int64_t token : head.place.tokens) {
    row.push_back(At(x, {head.place.batch, token, head.place.channel, static_cast<int64_t>(i)}));
  }
  return row;
}

// [B, W - 1, H, d]; zeros if absent.
Doubles TailOf(const ConstTensorView& x, const ReferenceHead& head, size_t i, size_t count) {
  Doubles row(count, 0.0);
  for (size_t s = 0; s < count && x.present(); ++s) {
    row[s] = At(x, {head.place.sequence, static_cast<int64_t>(s), head.place.channel, static_cast<int64_t>(i)});
  }
  return row;
}
void PutTail(const TensorView& to, const ReferenceHead& head, size_t i, const Doubles& from, size_t first) {
  for (size_t s = 0; s < head.tail(); ++s) {
    Put(to, {head.place.sequence, static_cast<int64_t>(s), head.place.channel, static_cast<int64_t>(i)},
        from[first + s]);
  }
}

Complexes StateOf(const ConstTensorView& x, const ReferenceHead& head, size_t i, size_t j, double sign) {
  Complexes h(head.modes.N());
  for (size_t n = 0; n < h.size() && x.present(); ++n) {
    const auto at = [&](int64_t part) {
      return At(x, {head.place.sequence, head.place.channel, static_cast<int64_t>(i), static_cast<int64_t>(j),
                    static_cast<int64_t>(n), part});
    };
    h[n] = {at(0), sign * at(1)};
  }
  return h;
}
void PutState(const TensorView& to, const ReferenceHead& head, size_t i, size_t j, const Complexes& h, double sign) {
  for (size_t n = 0; n < h.size(); ++n) {
    const auto put = [&](int64_t part, double value) {
      Put(to,
          {head.place.sequence, head.place.channel, static_cast<int64_t>(i), static_cast<int64_t>(j),
           static_cast<int64_t>(n), part},
          value);
    };
    put(0, h[n].real());
    put(1, sign * h[n].imag());
  }
}

}  // namespace

void ForEachHead(const Inputs& in, const Options& options, const std::function<void(const ReferenceHead&)>& f) {
  const auto d = static_cast<size_t>(in.q.size(3)), W = static_cast<size_t>(in.shift.size(1));
  for (const auto& place : scanning::PlacesOf(in.q.size(0), in.q.size(1), in.q.size(2), options)) {
    ReferenceHead head;
    head.place = place;
    head.modes = scanning::ModesOf(scanning::ModesIn(in), false, place.channel);
    for (size_t i = 0; i < d; ++i) {
      head.q.push_back(RowOf(in.q, head, i));
      head.v.push_back(RowOf(in.v, head, i));
      Doubles k = TailOf(in.initial.tail, head, i, W - 1);
      for (const double key : RowOf(in.k, head, i)) k.push_back(key);
      head.k_plus.push_back(k);
    }
    for (size_t i = 0; i < d; ++i) {
      Doubles taps, keys(head.T(), 0.0);
      const int64_t channel = head.ChannelOf(i);
      for (size_t s = 0; s < W; ++s) taps.push_back(At(in.shift, {channel, static_cast<int64_t>(s)}));
      if (in.shift_D.present()) taps[0] += At(in.shift_D, {channel});
      for (size_t t = 0; t < head.T(); ++t) {
        for (size_t s = 0; s < W; ++s) keys[t] += taps[s] * head.k_plus[i][t + W - 1 - s];
      }
      head.taps.push_back(taps);
      head.keys.push_back(keys);
    }
    f(head);
  }
}

void SetRow(const Inputs& in, const ReferenceHead& head, size_t i, size_t j, scanning::ReferenceRow& row) {
  if (row.h.empty()) row.h.emplace_back();
  row.h[0] = StateOf(in.initial.S, head, i, j, 1);
  row.u.resize(head.T());
  for (size_t t = 0; t < head.T(); ++t) row.u[t] = head.keys[i][t] * head.v[j][t];
  scanning::Walk(row);
}

std::vector<Doubles> IncomingOf(const BackwardInputs& in, const ReferenceHead& head) {
  std::vector<Doubles> rows;
  for (size_t j = 0; j < head.d(); ++j) rows.push_back(RowOf(in.d_o, head, j));
  return rows;
}

std::vector<Doubles> IncomingTailOf(const BackwardInputs& in, const ReferenceHead& head) {
  std::vector<Doubles> rows;
  for (size_t i = 0; i < head.d(); ++i) rows.push_back(TailOf(in.d_final.tail, head, i, head.tail()));
  return rows;
}

Complexes IncomingOf(const BackwardInputs& in, const ReferenceHead& head, size_t i, size_t j) {
  return StateOf(in.d_final.S, head, i, j, -1);
}

void Reference(const Inputs& in, const Options& options, const Outputs& out) {
  mechanism::Clear(out.o);
  ForEachHead(in, options, [&](const ReferenceHead& head) {
    scanning::ReferenceRow row = head.modes;
    for (size_t i = 0; i < head.d(); ++i) {
      PutTail(out.final.tail, head, i, head.k_plus[i], head.T());
      for (size_t j = 0; j < head.d(); ++j) {
        SetRow(in, head, i, j, row);
        for (size_t t = 0; t < head.T(); ++t) {
          Add(out.o, {head.place.batch, head.place.tokens[t], head.place.channel, static_cast<int64_t>(j)},
              head.q[i][t] * row.OutputAt(t));
        }
        PutState(out.final.S, head, i, j, row.h.back(), 1);
      }
    }
  });
}

void BackwardReference(const BackwardInputs& in, const Options& options, const Gradients& out) {
  for (const TensorView* t :
       {&out.q, &out.k, &out.v, &out.shift, &out.log_dt, &out.log_A_real, &out.A_imag, &out.C, &out.D, &out.shift_D}) {
    mechanism::Clear(*t);
  }
  ForEachHead(in, options, [&](const ReferenceHead& head) {
    const std::vector<Doubles> d_o = IncomingOf(in, head), of_tail = IncomingTailOf(in, head);
    const auto add = [&](const TensorView& to, size_t t, size_t channel, double value) {
      Add(to, {head.place.batch, head.place.tokens[t], head.place.channel, static_cast<int64_t>(channel)}, value);
    };
    scanning::ReferenceRow row = head.modes;
    for (size_t i = 0; i < head.d(); ++i) {
      Doubles dkeys(head.T(), 0.0);
      for (size_t j = 0; j < head.d(); ++j) {
        SetRow(in, head, i, j, row);
        Doubles dy;
        for (size_t t = 0; t < head.T(); ++t) dy.push_back(head.q[i][t] * d_o[j][t]);
        const auto l = GradientsOf(row, dy, IncomingOf(in, head, i, j));
        for (size_t t = 0; t < head.T(); ++t) {
          const double dx = row.InputGradientAt(t, dy, l);
          add(out.q, t, i, row.OutputAt(t) * d_o[j][t]);
          add(out.v, t, j, dx * head.keys[i][t]);
          dkeys[t] += dx * head.v[j][t];
        }
        AddParameterGradients(row, dy, l, scanning::ModesIn(out));
        PutState(out.initial.S, head, i, j, InitialGradients(row, l), -1);
      }
      // k_plus[e] contributed to keys e - tail to e, where they exist; the final tail holds the last of it.
      const size_t tail = head.tail();
      Doubles dk(head.T() + tail, 0.0);
      for (size_t t = 0; t < head.T(); ++t) {
        for (size_t s = 0; s <= tail; ++s) {
          dk[t + tail - s] += head.taps[i][s] * dkeys[t];
          Add(out.shift, {head.ChannelOf(i), static_cast<int64_t>(s)}, dkeys[t] * head.k_plus[i][t + tail - s]);
        }
        Add(out.shift_D, {head.ChannelOf(i)}, dkeys[t] * head.k_plus[i][t + tail]);
      }
      for (size_t s = 0; s < tail; ++s) dk[head.T() + s] += of_tail[i][s];
      for (size_t t = 0; t < head.T(); ++t) add(out.k, t, i, dk[t + tail]);
      PutTail(out.initial.tail, head, i, dk, 0);
    }
  });
}

}  // namespace heed::h3
