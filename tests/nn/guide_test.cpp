// The first program of docs/cpp.md works, and the page shows its programs as they are.
#define main train_embeddings
#include "docs/train_embeddings.cpp"
#undef main

#include <fstream>
#include <sstream>

#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

class Guide : public TableTest {};

std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_F(Guide, ItsProgramTrainsAndItsTablesStay) {
  std::string name = "train_embeddings";
  std::string folder = (folder_ / "store").string();
  char* arguments[] = {name.data(), folder.data(), nullptr};
  EXPECT_EQ(train_embeddings(2, arguments), 0);
  reopen_for_reading();
  const Table words = store().table("words");
  EXPECT_EQ(words.step(), 100U);
  EXPECT_LT(std::get<Adagrad>(words.optimizer()).lr, 0.05);
}

TEST_F(Guide, ShowsTheProgramsThatAreTested) {
  const std::filesystem::path docs = std::filesystem::path(__FILE__).parent_path() / "../../docs";
  for (const char* name : {"train_embeddings.cpp", "train_recommender.cpp"}) {
    const std::string program = text_of_file(docs / name);
    ASSERT_FALSE(program.empty());
    EXPECT_NE(text_of_file(docs / "cpp.md").find("```cpp\n" + program + "```\n"), std::string::npos)
        << "docs/cpp.md does not show docs/" << name << " as it is";
  }
}

}  // namespace
}  // namespace embermap
