#include "io/io_plan.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/aligned_buffer.hpp"
#include "tests/io/test_folder.hpp"

namespace embermap {
namespace {

constexpr DirectAlignment kSectors{512, 512};
constexpr DirectAlignment kNone{};
constexpr std::uint64_t kPage = 4096;

class IoPlanTest : public ::testing::Test {
 protected:
  // Piece `index` of `bytes` bytes lies at `memory + index * apart`.
  IoPiece piece(std::uint64_t offset, std::uint64_t bytes, std::uint64_t at, std::uint64_t room = 0) const {
    return {offset, memory_.data() + at, bytes, std::max(bytes, room)};
  }
  AlignedBuffer memory_{8 << 20};
};

TEST_F(IoPlanTest, NeighboursInFileAndMemoryAreOneVector) {
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 16; ++i) pieces.push_back(piece(i * kPage, kPage, i * kPage));
  for (const bool direct : {false, true}) {
    const IoPlan plan = plan_reads(pieces, direct ? kSectors : kNone, "f");
    ASSERT_EQ(plan.requests.size(), 1U);
    EXPECT_EQ(plan.vectors.size(), 1U);
    EXPECT_EQ(plan.requests[0].bytes, 16 * kPage);
    EXPECT_EQ(plan.requests[0].pieces, 16U);
    EXPECT_EQ(plan.requests[0].direct, direct);
    EXPECT_FALSE(plan.requests[0].bounced);
  }
}

TEST_F(IoPlanTest, NeighboursInTheFileAloneAreOneRequestOfManyVectors) {
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 300; ++i) pieces.push_back(piece(i * 512, 512, i * 1024));
  const IoPlan plan = plan_reads(pieces, kSectors, "f");
  ASSERT_EQ(plan.requests.size(), 2U);
  EXPECT_EQ(plan.requests[0].vectors, kRequestVectors);
  EXPECT_EQ(plan.requests[1].vectors, 300 - kRequestVectors);
  EXPECT_EQ(plan.requests[1].first_piece, kRequestVectors);
}

TEST_F(IoPlanTest, AGapOrTheLargestRequestEndsIt) {
  const IoPlan gap = plan_reads(std::vector{piece(0, kPage, 0), piece(2 * kPage, kPage, kPage)}, kSectors, "f");
  EXPECT_EQ(gap.requests.size(), 2U);
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i <= kRequestBytes / kPage; ++i) pieces.push_back(piece(i * kPage, kPage, i * kPage));
  const IoPlan large = plan_reads(pieces, kSectors, "f");
  ASSERT_EQ(large.requests.size(), 2U);
  EXPECT_EQ(large.requests[0].bytes, kRequestBytes);
  EXPECT_EQ(large.requests[1].bytes, kPage);
}

TEST_F(IoPlanTest, APieceLargerThanARequestIsShared) {
  const std::vector pieces{piece(0, 3 * kRequestBytes + 100, 0, 3 * kRequestBytes + 512)};
  const IoPlan plan = plan_reads(pieces, kSectors, "f");
  ASSERT_EQ(plan.requests.size(), 4U);
  EXPECT_EQ(plan.parts, std::vector<std::uint32_t>{4});
  for (const IoRequest& request : plan.requests) EXPECT_TRUE(request.part && request.direct && !request.bounced);
  EXPECT_EQ(plan.requests[3].bytes, 512U);
  EXPECT_EQ(plan.requests[3].needed, 100U);
  const IoPlan buffered = plan_reads(pieces, kNone, "f");
  EXPECT_EQ(buffered.requests.size(), 13U);
  EXPECT_EQ(buffered.requests.back().bytes, 100U);
}

TEST_F(IoPlanTest, WithoutRoomOrAlignmentAReadBouncesAsItsHull) {
  // No room to round up; begins inside a sector; memory at an odd address.
  for (const IoPiece& one : {piece(kPage, 100, 0), piece(kPage + 128, 512, 0), piece(kPage, 512, 1)}) {
    const IoPlan plan = plan_reads({&one, 1}, kSectors, "f");
    ASSERT_EQ(plan.requests.size(), 1U);
    const IoRequest& request = plan.requests[0];
    EXPECT_TRUE(request.bounced && request.direct);
    EXPECT_EQ(request.offset % 512, 0U);
    EXPECT_EQ(request.bytes % 512, 0U);
    EXPECT_LE(request.offset, one.offset);
    EXPECT_EQ(request.offset + request.needed, one.offset + one.bytes);
    EXPECT_GE(request.bytes, request.needed);
    EXPECT_EQ(request.vectors, 0U);
    EXPECT_EQ(plan.bounce_bytes, request.bytes);
  }
}

TEST_F(IoPlanTest, BouncedNeighboursTravelTogetherAndAreCopiedOut) {
  std::vector<IoPiece> pieces;
  for (std::uint64_t i = 0; i < 100; ++i) pieces.push_back(piece(128 + i * 4000, 4000, i * 5000));
  const IoPlan plan = plan_reads(pieces, kSectors, "f");
  EXPECT_EQ(plan.requests.size(), 4U);  // of at most 128 KiB
  std::vector<std::byte> file(512 * 1024);
  for (std::size_t i = 0; i < file.size(); ++i) file[i] = static_cast<std::byte>(i * 7 + i / 251);
  for (const IoRequest& request : plan.requests) {
    EXPECT_LE(request.bytes, kBouncedBytes);
    copy_out(request, file.data() + request.offset, pieces);
  }
  for (const IoPiece& one : pieces) EXPECT_EQ(std::memcmp(one.memory, file.data() + one.offset, one.bytes), 0);
}

TEST_F(IoPlanTest, WritesAreDirectWhereTheyAreAlignedAndNeverRoundUp) {
  const std::vector pieces{piece(0, kPage, 0), piece(kPage, 3584, kPage), piece(kPage + 3584, 100, 2 * kPage, kPage)};
  const IoPlan plan = plan_writes(pieces, kSectors, "f");
  ASSERT_EQ(plan.requests.size(), 2U);
  EXPECT_TRUE(plan.requests[0].direct);
  EXPECT_EQ(plan.requests[0].bytes, kPage + 3584);
  EXPECT_FALSE(plan.requests[1].direct);
  EXPECT_EQ(plan.requests[1].bytes, 100U);
  EXPECT_TRUE(plan.direct && plan.buffered && plan.shares_blocks);
  EXPECT_FALSE(plan_writes(std::span(pieces).first(1), kSectors, "f").shares_blocks);
}

TEST_F(IoPlanTest, WhatIsLeftOfARequest) {
  const std::vector pieces{piece(0, 512, 0), piece(512, 512, 1024), piece(1024, 100, 2048, 512)};
  const IoPlan plan = plan_reads(pieces, kSectors, "f");
  ASSERT_EQ(plan.requests.size(), 1U);
  const auto rest = memory_after(plan, plan.requests[0], 600);
  ASSERT_EQ(rest.size(), 2U);
  EXPECT_EQ(rest[0].iov_base, pieces[1].memory + 88);
  EXPECT_EQ(rest[0].iov_len, 424U);
  EXPECT_EQ(rest[1].iov_base, pieces[2].memory);
  EXPECT_EQ(rest[1].iov_len, 100U);
}

TEST_F(IoPlanTest, PiecesThatCannotBeAreNamed) {
  using testing::error_of;
  EXPECT_THAT(error_of<InvalidArgument>([&] {
                plan_reads(std::vector{piece(kPage, kPage, 0), piece(kPage + 1, 8, kPage)}, kSectors, "f.npy");
              }),
              ::testing::HasSubstr("f.npy: piece 1 at byte 4097 begins before byte 8192"));
  IoPiece tight = piece(0, 100, 0);
  tight.room = 99;
  EXPECT_THAT(error_of<InvalidArgument>([&] { plan_writes({&tight, 1}, kNone, "f"); }), ::testing::HasSubstr("room for 99"));
  const IoPiece far = piece(~0ULL - 10, 5, 0);
  EXPECT_THAT(error_of<IoError>([&] { plan_reads({&far, 1}, kNone, "f"); }), ::testing::HasSubstr("too large"));
  EXPECT_EQ(plan_reads(std::vector{piece(7, 0, 0)}, kSectors, "f").empty, std::vector<std::size_t>{0});
}

}  // namespace
}  // namespace embermap
