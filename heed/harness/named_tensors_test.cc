// NamedOf: conversion of tensors in memory to the inputs of a mechanism. tensor_file_test.cc tests files of tensors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "heed/core/error.h"
#include "heed/harness/buffer.h"
#include "heed/harness/tensor_file.h"

namespace heed {
namespace {

using testing::ThrowsMessage;

const std::vector<InputSpec> kInputs = {{"q", "BTHK"}, {"k", "BTHK"}, {"v", "BTHV"}, {"e", "RC", true}};

class NamedTensorsTest : public testing::Test {
 protected:
  void Add(const std::string& name, const std::vector<int64_t>& sizes, DType dtype = DType::kF32) {
    memory_.push_back(Buffer(dtype, sizes, Placement::kAligned).FillNormal(memory_.size() + 1));
    given_[name] = memory_.back().view();
  }

  std::vector<Buffer> memory_;
  TensorMap given_;
};

TEST_F(NamedTensorsTest, WhatFitsIsSeenInPlace) {
  for (const char* name : {"q", "k", "v"}) Add(name, {2, 5, 3, 4});
  Add("other", {7});
  const NamedTensors set = NamedOf("arrays", given_, kInputs, {});
  EXPECT_EQ(set.file, "arrays");
  EXPECT_EQ(set.tensors.size(), 3u);
  EXPECT_EQ(set.tensors.at("q").data(), given_.at("q").data());
  EXPECT_TRUE(SameBits(set.tensors.at("v"), given_.at("v")));
}

TEST_F(NamedTensorsTest, OnlyTheFirstTokensAreTaken) {
  for (const char* name : {"q", "k", "v"}) Add(name, {2, 5, 3, 4});
  Add("e", {6, 5});
  TensorChoice choice;
  choice.tokens = 3;
  const NamedTensors set = NamedOf("arrays", given_, kInputs, choice);
  for (const char* name : {"q", "k", "v"})
    EXPECT_TRUE(SameBits(set.tensors.at(name), given_.at(name).Slice(1, 0, 3))) << name;
  EXPECT_TRUE(SameBits(set.tensors.at("e"), given_.at("e").Slice(1, 0, 3)));
  choice.tokens = 99;
  EXPECT_TRUE(SameBits(NamedOf("arrays", given_, kInputs, choice).tensors.at("q"), given_.at("q")));
}

TEST_F(NamedTensorsTest, OneHeadServesSeveral) {
  Add("q", {2, 5, 4, 3});
  Add("k", {2, 5, 2, 3});
  Add("v", {2, 5, 2, 3});
  TensorChoice choice;
  choice.tokens = 4;
  const NamedTensors set = NamedOf("arrays", given_, kInputs, choice);
  const ConstTensorView& k = set.tensors.at("k");
  ASSERT_EQ(k.ShapeString(), "[2,4,4,3]");
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_TRUE(SameBits(k.Slice(2, h, h + 1), given_.at("k").Slice(1, 0, 4).Slice(2, h / 2, h / 2 + 1))) << h;
  }
}

TEST_F(NamedTensorsTest, MessagesBeginWithTheName) {
  for (const char* name : {"q", "k"}) Add(name, {2, 5, 3, 4});
  Add("v", {2, 5, 4});
  EXPECT_THAT([&] { NamedOf("arrays", given_, kInputs, {}); },
              ThrowsMessage<FileError>("arrays: v has shape [2,5,4], expected [B,T,H,V] or [T,H,V]"));
}

}  // namespace
}  // namespace heed
