// Patterns: their pairs against the definitions, expressions, lists of tiles, and errors.
#include "heed/patterns/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "heed/core/error.h"
#include "heed/patterns/pattern_block_mask.h"
#include "heed/patterns/pattern_case.h"
#include "heed/patterns/pattern_internal.h"

namespace heed::patterns {
namespace {

using softmax::MaskTile;
using testing::HasSubstr;
using testing::ThrowsMessage;

ConstTensorView View(const std::vector<int64_t>& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::kI64, shape};
}
ConstTensorView View(const std::vector<uint8_t>& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::kBool, shape};
}

// A random call, and patterns that fit it.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {
    call.Tq = Below(5) == 0 ? Below(3) : Below(200);
    call.Tk = Below(5) == 0 ? Below(3) : Below(300);
    call.key_heads = 1 + Below(2);
    call.query_heads = call.key_heads * (1 + Below(3));
    const int64_t entries = 1 + Below(3);
    const bool same = Below(2) == 0;
    for (int64_t b = 0; b < entries; ++b) {
      call.starts.push_back(same ? call.Tk - call.Tq : Below(2) == 0 ? Below(300) : -Below(100));
    }
    call.batch = Below(3) == 0 ? 1 : 0;
    call.batches = entries + call.batch;
  }
  int64_t Below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  Pattern Any(int depth) {
    return RandomPattern(call, depth, [this](int64_t n) { return Below(n); });
  }

  PatternCall call;

 private:
  std::mt19937_64 engine_;
};

TEST(PatternTest, ListsHaveThePairsOfTheDefinitions) {
  for (uint64_t seed = 1; seed <= 600; ++seed) {
    Random random(seed);
    const PatternCall& call = random.call;
    const Pattern pattern = random.Any(static_cast<int>(seed % 4));
    SCOPED_TRACE(std::to_string(seed) + ": " + pattern.ToString().substr(0, 300));
    CheckPattern("test", pattern, call);
    const auto mask = Compile(pattern, call);
    for (int64_t b = 0; b < static_cast<int64_t>(call.starts.size()); ++b) {
      for (int64_t head = 0; head < call.query_heads; ++head) {
        for (int64_t row = 0; row < call.Tq; ++row) {
          std::vector<uint64_t> words(static_cast<size_t>((call.Tk + 63) / 64));
          int64_t before = -1;
          for (const MaskTile& entry : mask->Of(b, head, row)) {
            ASSERT_GT(entry.tile, before);
            before = entry.tile;
            words.at(static_cast<size_t>(entry.tile)) = mask->WordOf(entry, row);
          }
          for (int64_t key = 0; key < call.Tk; ++key) {
            const bool kept = (words[static_cast<size_t>(key / 64)] >> (key % 64) & 1) != 0;
            ASSERT_EQ(kept, Keeps(pattern, call, b, head, row, key)) << b << " " << head << " " << row << " " << key;
          }
        }
      }
    }
  }
}

TEST(PatternTest, TilesAreListedWhereSomethingIsKeptAndHaveWordsWhereNotAllIs) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    Random random(seed);
    const PatternCall& call = random.call;
    const Pattern pattern = random.Any(2);
    const auto mask = Compile(pattern, call);
    for (int64_t b = 0; b < mask->batch; ++b) {
      for (int64_t head = 0; head < mask->heads; ++head) {
        for (int64_t row = 0; row < call.Tq; row += 64) {
          for (const MaskTile& entry : mask->Of(b, head, row)) {
            const int64_t rows = std::min<int64_t>(64, call.Tq - row);
            const int64_t keys = std::min<int64_t>(64, call.Tk - 64 * entry.tile);
            int64_t kept = 0;
            for (int64_t i = row; i < row + rows; ++i) {
              kept += std::popcount(mask->WordOf(entry, i) << (64 - keys));
            }
            ASSERT_GT(kept, 0) << pattern.ToString();
            ASSERT_EQ(entry.words < 0, kept == rows * keys) << pattern.ToString();
          }
        }
      }
    }
  }
}

// A band costs its width, however long the sequence, and so does a comb of distant positions.
TEST(PatternTest, ListsAreAsLongAsWhatIsKept) {
  PatternCall call = {.Tq = 1 << 17, .Tk = 1 << 17, .starts = {0}};
  const std::vector<int64_t> none;
  const auto of = [&](const Pattern& pattern) { return Compile(pattern, call)->tiles.size(); };
  const size_t blocks = size_t{1} << 11;
  EXPECT_LE(of(SlidingWindow(255, 0)), blocks * 5);
  EXPECT_LE(of(Longformer(512, View(none, {0}))), blocks * 9);
  EXPECT_LE(of(BigBird(64, 3)), (blocks - 2) * 8 + 2 * blocks);
  EXPECT_LE(of(Dilated(4, 4096)), blocks * 9);
  EXPECT_LE(of(SlidingWindow(1 << 20, 1 << 20) & Streaming(4, 64)), blocks * 3);
  EXPECT_EQ(Compile(SlidingWindow(255, 0), call).get(), Compile(SlidingWindow(255), call).get());
}

// Lists compiled for a call are found again for the same shape, and not for a shape that differs in one number.
TEST(PatternTest, ListsAreOfTheShapeOfTheirCall) {
  const Pattern pattern = BigBird(64, 1, 5);
  const PatternCall call = {.Tq = 320, .Tk = 640, .query_heads = 4, .key_heads = 2, .starts = {320}};
  const auto list = Compile(pattern, call);
  EXPECT_EQ(Compile(pattern, call), list);
  const auto other = [&](const auto& change) {
    PatternCall changed = call;
    change(changed);
    return Compile(pattern, changed);
  };
  EXPECT_NE(other([](PatternCall& c) { c.Tq = 256; }), list);
  EXPECT_NE(other([](PatternCall& c) { c.Tk = 704; }), list);
  EXPECT_NE(other([](PatternCall& c) { c.query_heads = 6; }), list);
  EXPECT_NE(other([](PatternCall& c) { c.key_heads = 1; }), list);
  EXPECT_NE(other([](PatternCall& c) { c.batch = 1; }), list);
  EXPECT_NE(other([](PatternCall& c) { c.starts = {0}; }), list);
}

TEST(PatternTest, BigBirdHasFixedBlocksAndDrawsTheRestOnce) {
  for (const int64_t nb : {12, 16, 40}) {
    const PatternCall call = {.Tq = nb * 64, .Tk = nb * 64, .query_heads = 3, .starts = {0}};
    const auto mask = Compile(BigBird(64, 3, 5), call);
    std::set<std::vector<int64_t>> different;
    for (int64_t head = 0; head < 3; ++head) {
      for (int64_t b = 0; b < nb; ++b) {
        const auto list = mask->Of(0, head, b * 64);
        std::set<int64_t> tiles;
        for (const MaskTile& entry : list) {
          EXPECT_EQ(entry.words, -1);
          tiles.insert(entry.tile);
        }
        const bool whole = b == 0 || b == nb - 1;
        const int64_t fixed = b == 1 || b == nb - 2 ? 4 : 5;
        EXPECT_EQ(static_cast<int64_t>(list.size()), whole ? nb : fixed + 3) << nb << " " << b;
        for (const int64_t tile : {int64_t{0}, nb - 1, std::max<int64_t>(b - 1, 0), b, std::min(b + 1, nb - 1)}) {
          EXPECT_TRUE(tiles.contains(tile));
        }
        different.insert({tiles.begin(), tiles.end()});
      }
    }
    EXPECT_GT(different.size(), static_cast<size_t>(nb));  // different by head and block
  }
  const PatternCall few = {.Tq = 704, .Tk = 704, .starts = {0}};
  EXPECT_EQ(Density(BigBird(64, 3), few, false), 1);
}

TEST(PatternTest, ExpressionsAreReadAsTheyAreWritten) {
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    const Pattern pattern = Random(seed).Any(static_cast<int>(seed % 5));
    const std::string text = pattern.ToString();
    if (text.find('<') != std::string::npos) {
      EXPECT_THROW(Pattern::Parse(text), InvalidArgument);
      continue;
    }
    const Pattern again = Pattern::Parse(text);
    ASSERT_EQ(again.ToString(), text);
    ASSERT_TRUE(again == pattern);
  }
  const std::pair<const char*, const char*> shorter[] = {
      {"sliding_window(128)", "sliding_window(left=128, right=0)"},
      {" bigbird ( random = 2 ) ", "bigbird(block=64, random=2, seed=0)"},
      {"longformer(512,[0,-1])", "longformer(window=512, tokens=[0, -1])"},
      {"atrous(2)|atrous(3)&atrous(5)", "atrous(step=2) | atrous(step=3) & atrous(step=5)"},
      {"(atrous(2)|atrous(3))&atrous(5)", "(atrous(step=2) | atrous(step=3)) & atrous(step=5)"},
      {"blocks([[True,False]], (64, 128))", "blocks(keep=[[True, False]], block=(64, 128))"},
      {"random_blocks(1, seed=18446744073709551615)", "random_blocks(count=1, block=64, seed=18446744073709551615)"},
      {"per_head([atrous(2), dilated(1,2)])", "per_head(heads=[atrous(step=2), dilated(reach=1, step=2)])"}};
  for (const auto& [text, whole] : shorter) EXPECT_EQ(Pattern::Parse(text).ToString(), whole);
}

TEST(PatternTest, LargeTablesAreEqualToThemselvesAlone) {
  const std::vector<uint8_t> keep(5000, 1);
  const Pattern a = Blocks(View(keep, {50, 100})), b = Blocks(View(keep, {50, 100}));
  EXPECT_EQ(a.ToString(), "blocks(keep=<bool[50,100]>, block=64)");
  EXPECT_TRUE(a == a);
  EXPECT_FALSE(a == b);
  EXPECT_THAT([&] { Pattern::Parse(a.ToString()); },
              ThrowsMessage<InvalidArgument>(HasSubstr("has '<bool[50,100]>, ' at character 13, expected '['")));
}

TEST(PatternTest, ExpressionsThatDoNotParseSayWhere) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "has the end at character 1, expected one of sliding_window, dilated"},
      {"atrous", "has the end at character 7, expected '('"},
      {"atrous(2", "has the end at character 9, expected ','"},
      {"atrous(2))", "has ')' at character 10, expected '|', '&' or the end"},
      {"atrous(2) atrous(3)", "at character 11, expected '|', '&' or the end"},
      {"atrous()", "has the end at character 9, expected step of atrous"},
      {"atrous(2, 3)", "has '3)' at character 11, expected ')': atrous takes 1"},
      {"atrous(steps=2)", "has 'steps=2)' at character 8, expected another argument of atrous"},
      {"dilated(reach=2, 3)", "has '3)' at character 18, expected an argument by name"},
      {"dilated(2, reach=3)", "has 'reach=3)' at character 12, expected another argument of dilated"},
      {"atrous(x)", "has 'x)' at character 8, expected a whole number"},
      {"atrous(1.5)", "has '.5)' at character 9, expected ','"},
      {"atrous(99999999999999999999)", "expected a smaller number"},
      {"atrous(-1)", "atrous: step is -1, expected 1 or more"},
      {"bigbird(seed=-1)", "has '-1)' at character 14, expected a whole number"},
      {"global_tokens(3)", "has '3)' at character 15, expected '['"},
      {"global_tokens([[1, 2], [3]])", "expected lists of one length, 2"},
      {"global_tokens([1, [2]])", "expected a number"},
      {"global_tokens([[1], 2])", "has '2])' at character 21, expected '['"},
      {"global_tokens([-2])", "global_tokens: tokens has -2, expected 0 or more, or -1"},
      {"blocks([[1]])", "has '1]])' at character 10, expected True or False"},
      {"nonsense(1)", "has 'nonsense(1)' at character 1, expected one of"},
      {std::string("a\0\n\xc3\xa9", 5), "has 'a?\?\?\?' at character 1, expected one of"},
      {std::string(100, '('), "expected 64 levels at most"},
      {"global_tokens(" + std::string(100, '['), "expected 64 levels at most"},
      {std::string((size_t{1} << 20) + 1, ' '), "expected 2^20 characters at most"}};
  for (const auto& [text, message] : cases) {
    EXPECT_THAT([&text = text] { Pattern::Parse(text); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)))
        << text.substr(0, 40);
  }
}

TEST(PatternTest, ArgumentsThatMeanNothingAreRefused) {
  const std::vector<int64_t> one = {1}, wrong = {-2, 0}, falling = {0, 2, 1}, pair = {3, 3}, ptr = {0, 2}, none;
  const std::vector<int64_t> ascending = {0, 1, 2}, heads = {0, 2, 0, 1}, absent = {0, -1};
  const std::vector<uint8_t> keep = {1};
  const std::vector<float> floats = {1};
  const std::pair<std::function<void()>, const char*> cases[] = {
      {[] { SlidingWindow(-1); }, "sliding_window: left is -1, expected 0 or more"},
      {[] { Dilated(1, 0); }, "dilated: step is 0, expected 1 or more"},
      {[] { Fixed(4, 5); }, "fixed: summary is 5, expected 0 to block = 4"},
      {[] { Streaming(1, 0); }, "streaming: window is 0, expected 1 or more"},
      {[] { Neighborhood(0); }, "neighborhood: window is 0, expected 1 or more"},
      {[] { RandomBlocks(0); }, "random_blocks: count is 0, expected 1 or more"},
      {[] { BigBird(0); }, "bigbird: block is 0, expected 1 or more"},
      {[] { SlidingWindow(INT64_MAX); }, "sliding_window: left is 9223372036854775807"},
      {[] { GlobalTokens({}); }, "global_tokens: tokens is absent, expected a tensor"},
      {[&] { GlobalTokens(View(wrong, {1})); }, "global_tokens: tokens has -2, expected 0 or more, or -1"},
      {[&] { GlobalTokens(View(one, {1, 1, 1})); }, "tokens has shape [1,1,1], expected [n] or [B, n]"},
      {[&] { GlobalTokens({floats.data(), DType::kF32, {1}}); }, "tokens has dtype f32, expected i32 or i64"},
      {[&] { Blocks(View(keep, {1})); }, "blocks: keep has shape [1], expected [nq, nk]"},
      {[&] { Blocks(View(one, {1, 1})); }, "blocks: keep has dtype i64, expected bool"},
      {[&] { Blocks(View(keep, {1, 1}), 0); }, "blocks: block is 0, expected 1 or more"},
      {[&] { Blocks(View(keep, {0, 1, 1})); }, "blocks: keep has shape [0,1,1], expected 1 head or more"},
      {[&] { Blocks(View(keep, {1, 1}), 1, INT64_MAX / 2); }, "blocks: block is 4611686018427387903"},
      {[&] { Csr(View(falling, {3}), View(one, {1})); }, "csr: row_ptr goes from 0 to 2 at 0"},
      {[&] { Csr(View(falling, {3}), View(pair, {2})); }, "csr: columns has 3 behind 3 in row 0"},
      {[&] { Csr(View(falling, {3}), View(ptr, {2})); }, "csr: row_ptr goes from 2 to 1 at 1"},
      {[&] { Csr(View(ptr, {0}), View(none, {0})); }, "csr: row_ptr has shape [0], expected nq + 1 numbers"},
      {[&] { Csr(View(ptr, {0, 2}), View(none, {0})); }, "csr: row_ptr has shape [0,2], expected 1 head or more"},
      {[&] { Csr(View(ptr, {1}), View(one, {1})); }, "csr: row_ptr ends with 0, expected 1, the size of columns"},
      {[&] { Csr(View(ptr, {2}), View(ascending, {3})); }, "csr: row_ptr ends with 2, expected 3, the size of columns"},
      {[&] { Csr(View(one, {1}), View(one, {1})); }, "csr: row_ptr begins with 1, expected 0"},
      {[&] { Csr(View(heads, {2, 2}), View(ascending, {3})); },
       "csr: row_ptr begins with 0, expected 2 as the head before ends"},
      {[&] { Csr(View(ptr, {2}), View(wrong, {2})); }, "csr: columns has -2, expected 0 or more, or -1"},
      {[&] { Csr(View(ptr, {2}), View(absent, {2})); }, "csr: columns has -1 behind 0 in row 0"},
      {[&] { Csr(View(ptr, {2}), View(pair, {2})); }, "csr: columns has 3 behind 3 in row 0"},
      {[&] { Keys(View(pair, {1, 1, 2})); }, "keys: index has key 3 twice, expected it once"},
      {[&] { RowBlocks(View(pair, {1, 1, 2})); }, "row_blocks: index has block 3 twice, expected it once"},
      {[&] { RowBlocks(View(pair, {2})); }, "row_blocks: index has shape [2], expected [B, Tq, n] or [B, Tq, Hp, n]"},
      {[&] { RowBlocks(View(pair, {1, 2, 1}), 0); }, "row_blocks: block is 0, expected"},
      {[&] { RowBlocks(View(pair, {1, 2, 1}), int64_t{1} << 60); },
       "row_blocks: index has block 3, expected one below 2"},
      {[&] { Keys(View(pair, {2})); }, "keys: index has shape [2], expected [B, Tq, n]"},
      {[&] { RowBlocks(View(none, {1, 2, 0, 1})); }, "row_blocks: index has shape [1,2,0,1], expected 1 head or more"},
      {[] { PerHead({Pattern()}); }, "per_head: heads is no list of patterns"},
      {[] { PerHead({}); }, "per_head: heads is empty, expected a pattern for each head"},
      {[] { Atrous(2) | Pattern(); }, "one side of | is absent"}};
  for (const auto& [make, message] : cases) {
    EXPECT_THAT(make, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
  }
  const auto deeper = [] {
    Pattern deep = Atrous(2);
    for (int i = 0; i < 300; ++i) deep = deep | Atrous(3);
  };
  EXPECT_THAT(deeper, ThrowsMessage<InvalidArgument>(HasSubstr("more than 256 patterns one inside the other")));
}

TEST(PatternTest, BlockMasksHaveTheirOwnRowsAndAreEqualToThemselvesAlone) {
  const std::vector<int64_t> row_ptr = {0, 1, 3}, columns = {0, 0, 1}, parts = {0, -1, 1}, bits = {1, 3, 1, 2};
  const auto make = [&] {
    return BlockMask(
        {View(row_ptr, {1, 1, 3}), View(columns, {3}), View(parts, {3}), View(bits, {2, 2, 1}), 2, 2, 3, 4});
  };
  const Pattern pattern = make();
  EXPECT_EQ(pattern.ToString(), "block_mask(<3 x 4 in blocks of 2 x 2: 1 whole, 2 in part>)");
  EXPECT_TRUE(pattern == pattern);
  EXPECT_FALSE(pattern == make());
  EXPECT_THROW(Pattern::Parse(pattern.ToString()), InvalidArgument);
  for (const int64_t start : {0, 1, 70}) {  // rows of the call, whatever its start
    std::vector<uint8_t> keep(12);
    Mask(pattern, {.Tq = 3, .Tk = 4, .starts = {start}}, false, {keep.data(), DType::kBool, {1, 1, 3, 4}});
    EXPECT_EQ(keep, (std::vector<uint8_t>{1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0}));
  }
}

TEST(PatternTest, BlockMasksThatDoNotFitThemselvesAreRefused) {
  const std::vector<int64_t> row_ptr = {0, 1, 3}, columns = {0, 0, 1}, parts = {0, -1, 1}, bits = {1, 3, 1, 2};
  const BlockMaskInputs good = {
      View(row_ptr, {1, 1, 3}), View(columns, {3}), View(parts, {3}), View(bits, {2, 2, 1}), 2, 2, 3, 4};
  const std::vector<int64_t> falling = {0, 2, 1}, late = {1, 1, 3}, short_ptr = {0, 1, 2}, far = {0, 0, 2},
                             twice = {0, 1, 1}, many = {0, -1, 2}, two = {0, 1, 0};
  const std::pair<std::function<void(BlockMaskInputs&)>, const char*> cases[] = {
      {[](auto& x) { x.rows = 0; }, "block_mask: rows is 0, expected 1 or more"},
      {[](auto& x) { x.Tk = -1; }, "block_mask: Tk is -1, expected 0 or more"},
      {[](auto& x) { x.Tq = 5; }, "row_ptr has shape [1,1,3], expected [B, Hp, 4]"},
      {[&](auto& x) { x.row_ptr = View(row_ptr, {3}); }, "row_ptr has shape [3], expected [B, Hp, 3]"},
      {[&](auto& x) {
         x.row_ptr = View(falling, {1, 1, 3});
         x.columns = View(two, {3});
       },
       "row_ptr goes from 2 to 1 at 1"},
      {[&](auto& x) { x.row_ptr = View(late, {1, 1, 3}); }, "row_ptr begins with 1, expected 0"},
      {[&](auto& x) { x.row_ptr = View(short_ptr, {1, 1, 3}); },
       "row_ptr ends with 2, expected 3, the size of columns"},
      {[&](auto& x) { x.columns = View(far, {3}); }, "columns has 2 behind 0 in row 1, expected columns that ascend"},
      {[&](auto& x) { x.columns = View(twice, {3}); }, "columns has 1 behind 1"},
      {[&](auto& x) { x.columns = View(columns, {3, 1}); }, "columns has shape [3,1], expected [n]"},
      {[&](auto& x) { x.parts = View(many, {3}); }, "parts has 2, expected -1 to 1"},
      {[&](auto& x) { x.parts = View(parts, {2}); }, "parts has shape [2], expected [3]"},
      {[&](auto& x) { x.bits = View(bits, {4, 1, 1}); }, "bits has shape [4,1,1], expected [4,2,1]"},
      {[](auto& x) { x.bits = {}; }, "block_mask: bits is absent, expected a tensor"}};
  EXPECT_NO_THROW(BlockMask(good));
  for (const auto& [change, message] : cases) {
    BlockMaskInputs bad = good;
    change(bad);
    EXPECT_THAT([&] { BlockMask(bad); }, ThrowsMessage<InvalidArgument>(HasSubstr(message)));
  }
}

TEST(PatternTest, PatternsThatDoNotFitACallAreRefused) {
  const PatternCall call = {.Tq = 4, .Tk = 8, .query_heads = 4, .key_heads = 2, .starts = {4, 4}};
  const std::vector<int64_t> index(3 * 4, 1);
  const std::vector<uint8_t> keep(3, 1);
  const std::vector<int64_t> row_ptr(12), none;
  const auto block_mask = [&](int64_t batches, int64_t heads, int64_t Tk) {
    return BlockMask(
        {View(row_ptr, {batches, heads, 2}), View(none, {0}), View(none, {0}), View(none, {0, 4, 1}), 4, 4, 4, Tk});
  };
  const std::pair<Pattern, const char*> cases[] = {
      {block_mask(1, 1, 9), "pattern has a block mask of 4 rows and 9 keys, expected 4 and 8"},
      {block_mask(3, 1, 8), "pattern has a block mask of 3 batch entries, expected 1 or 2"},
      {PerHead({Atrous(2), Atrous(2), Atrous(2), GlobalTokens(View(index, {3, 4}))}),
       "pattern has global tokens of 3 batch"},
      {block_mask(1, 2, 8), "pattern has a block mask of 2 heads, expected 1 or 4 as q"},
      {GlobalTokens(View(index, {3, 4})), "pattern has global tokens of 3 batch entries, expected 1 or 2"},
      {Blocks(View(keep, {3, 1, 1})), "pattern has blocks of 3 heads, expected 1, 2 or 4"},
      {Blocks(View(keep, {3, 1, 1, 1})), "pattern has blocks of 3 batch entries, expected 1 or 2"},
      {RowBlocks(View(index, {3, 4, 1})), "pattern has row blocks of shape [3,4,n], expected [2,4,n]"},
      {Keys(View(index, {3, 4, 1})), "pattern has keys of shape [3,4,n], expected [2,4,n] or [2,4,2,n]"},
      {PerHead({Atrous(2)}), "pattern has 1 heads, expected 4 as q"}};
  for (const auto& [pattern, text] : cases) {
    const std::string message = text;
    for (const Pattern& inside : {pattern, Atrous(2) | pattern, pattern & Atrous(2)}) {
      const auto check = [&] { CheckPattern("attention", inside, call); };
      EXPECT_THAT(check, ThrowsMessage<InvalidArgument>(HasSubstr("attention: " + message)));
    }
  }
}

TEST(PatternTest, ATableOfOneBatchEntryServesAll) {
  const PatternCall call = {.Tq = 3, .Tk = 4, .query_heads = 2, .starts = {1, 1}};
  const std::vector<uint8_t> keep = {1, 0, 0, 1, 0, 1, 1, 1};
  const std::vector<int64_t> index = {0, 2, 3, 1, 0, -1};
  const std::vector<std::pair<Pattern, Pattern>> alike = {
      {Blocks(View(keep, {1, 2, 2, 2}), 2), Blocks(View(keep, {2, 2, 2}), 2)},
      {GlobalTokens(View(index, {1, 2})), GlobalTokens(View(index, {2}))},
      {Longformer(1, View(index, {1, 2})), Longformer(1, View(index, {2}))}};
  const auto mask = [&](const Pattern& pattern, const PatternCall& of) {
    const int64_t B = std::ssize(of.starts);
    std::vector<uint8_t> kept(static_cast<size_t>(B * 2 * 3 * 4), 7);
    Mask(pattern, of, false, {kept.data(), DType::kBool, {B, 2, 3, 4}});
    return kept;
  };
  for (const auto& [a, b] : alike) EXPECT_EQ(mask(a, call), mask(b, call)) << a.ToString();
  // Patterns that list keys for each row of a call.
  const std::vector<Pattern> listed = {Keys(View(index, {1, 3, 2})), RowBlocks(View(index, {1, 3, 2}), 2),
                                       VerticalSlash({{1, 2, 1}, {0, 2}}, {{1, 2, 1}, {0, 1}})};
  for (const Pattern& pattern : listed) {
    PatternCall alone = call;
    alone.starts = {1};
    std::vector<uint8_t> twice = mask(pattern, alone);
    twice.insert(twice.end(), twice.begin(), twice.end());
    EXPECT_EQ(mask(pattern, call), twice) << pattern.ToString();
  }
}

TEST(PatternTest, CallsWhoseNumbersMeanNothingAreRefused) {
  const PatternCall good = {.Tq = 2, .Tk = 3, .query_heads = 4, .key_heads = 2, .starts = {1}};
  std::vector<uint8_t> keep(24);
  const TensorView to(keep.data(), DType::kBool, {1, 4, 2, 3});
  const std::pair<std::function<void(PatternCall&)>, const char*> cases[] = {
      {[](auto& x) { x.query_heads = 0; }, ": query_heads is 0, expected 1 to "},
      {[](auto& x) { x.key_heads = 0; }, ": key_heads is 0, expected 1 to "},
      {[](auto& x) { x.key_heads = 3; }, ": query_heads is 4, expected a multiple of 3"},
      {[](auto& x) { x.Tq = -1; }, ": Tq is -1, expected 0 to "},
      {[](auto& x) { x.Tk = -1; }, ": Tk is -1, expected 0 to "},
      {[](auto& x) { x.batch = -1; }, ": batch is -1, expected 0 to "},
      {[](auto& x) { x.batches = 0; }, ": batches is 0, expected 1 to "},
      {[](auto& x) { x.starts = {INT64_MIN}; }, ": starts is -9223372036854775808, expected -2305843009213693952 to "}};
  for (const auto& [change, message] : cases) {
    PatternCall bad = good;
    change(bad);
    EXPECT_THAT([&] { Mask(Atrous(2), bad, false, to); },
                ThrowsMessage<InvalidArgument>(HasSubstr(std::string("mask") + message)));
    EXPECT_THAT([&] { Density(Atrous(2), bad, false); },
                ThrowsMessage<InvalidArgument>(HasSubstr(std::string("density") + message)));
  }
  EXPECT_THAT([&] { Mask({}, good, false, to); }, ThrowsMessage<InvalidArgument>(HasSubstr("pattern is absent")));
  EXPECT_THAT([&] { Density({}, good, false); }, ThrowsMessage<InvalidArgument>(HasSubstr("pattern is absent")));
  const std::function<void(PatternCall&)> nothing[] = {[](auto& x) { x.Tq = 0; }, [](auto& x) { x.Tk = 0; },
                                                       [](auto& x) { x.starts = {}; }};
  for (const auto& empty : nothing) {
    PatternCall call = good;
    empty(call);
    EXPECT_EQ(Density(Atrous(1), call, false), 0);
  }
}

TEST(PatternTest, MasksAndDensitiesAreThoseOfTheDefinitions) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    Random random(seed);
    const PatternCall& call = random.call;
    const Pattern pattern = random.Any(2);
    const auto entries = static_cast<int64_t>(call.starts.size());
    for (const bool causal : {false, true}) {
      std::vector<uint8_t> keep(static_cast<size_t>(entries * call.query_heads * call.Tq * call.Tk), 7);
      Mask(pattern, call, causal, {keep.data(), DType::kBool, {entries, call.query_heads, call.Tq, call.Tk}});
      double kept = 0, all = 0;
      size_t at = 0;
      for (int64_t b = 0; b < entries; ++b) {
        for (int64_t head = 0; head < call.query_heads; ++head) {
          for (int64_t row = 0; row < call.Tq; ++row) {
            for (int64_t key = 0; key < call.Tk; ++key, ++at) {
              const bool counts = !causal || key <= call.starts[static_cast<size_t>(b)] + row;
              const bool expected = counts && Keeps(pattern, call, b, head, row, key);
              ASSERT_EQ(keep[at], expected) << seed;
              kept += expected;
              all += counts;
            }
          }
        }
      }
      EXPECT_DOUBLE_EQ(Density(pattern, call, causal), all > 0 ? kept / all : 0);
    }
  }
}

TEST(PatternTest, ListsAreCompiledFromAnyThread) {
  std::vector<std::thread> threads;
  std::vector<int> wrong(4);
  for (size_t i = 0; i < wrong.size(); ++i) {
    threads.emplace_back([&wrong, i] {
      for (int64_t n = 1; n <= 200; ++n) {
        const PatternCall call = {.Tq = 64, .Tk = 64 * n, .starts = {0}};
        const size_t tiles = Compile(SlidingWindow(0, 64 * n), call)->tiles.size();
        wrong[i] += tiles != static_cast<size_t>(n);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4));
}

}  // namespace
}  // namespace heed::patterns
