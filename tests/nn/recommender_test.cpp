// The recommender of docs/cpp.md goes on where it was killed, to the same bits.
#include <spawn.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdio>

#include "nn/checkpoint.hpp"
#include "tests/nn/table_fixture.hpp"

extern char** environ;

namespace embermap {
namespace {

using testing::HasSubstr;

class Recommender : public TableTest {
 protected:
  struct Outcome {
    int status = 0;  // of waitpid
    std::string text;
  };

  // Runs the program, and kills it (SIGKILL) as soon as it has printed `until`.
  Outcome run(const std::filesystem::path& folder, int steps, const std::string& until = {}) {
    std::filesystem::create_directories(folder);
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addclose(&actions, ends[0]);
    std::string name = EMBERMAP_RECOMMENDER;
    std::string where = folder.native();
    std::string count = std::to_string(steps);
    std::array<char*, 4> arguments{name.data(), where.data(), count.data(), nullptr};
    pid_t child = 0;
    // With one thread, and one way of adding, whatever places memory has: else sums of dense layers differ in their last bits.
    std::string threads = "OMP_NUM_THREADS=1", sums = "MKL_CBWR=COMPATIBLE";
    std::vector<char*> environment{threads.data(), sums.data()};
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&child, name.c_str(), &actions, nullptr, arguments.data(), environment.data()), 0);
    posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    Outcome out;
    std::array<char, 512> buffer{};
    for (ssize_t got = 0; (got = ::read(ends[0], buffer.data(), buffer.size())) > 0;) {
      out.text.append(buffer.data(), static_cast<std::size_t>(got));
      if (!until.empty() && out.text.find(until) != std::string::npos) ::kill(child, SIGKILL);
    }
    ::close(ends[0]);
    waitpid(child, &out.status, 0);
    return out;
  }

  // Everything that training could have changed.
  static std::vector<torch::Tensor> all_of(const std::filesystem::path& folder) {
    std::vector<torch::Tensor> out;
    Store store = Store::open(folder / "store", {.mode = StoreOptions::Mode::kRead, .memory = 64ULL << 20});
    const torch::Tensor users = torch::arange(1000) * 9973;
    const torch::Tensor items = torch::arange(1000) * 997;
    const auto add = [&](Table table, const torch::Tensor& some, const char* field) {
      out.push_back(torch::empty({some.numel(), static_cast<std::int64_t>(table.dim())}));
      table.gather({some.const_data_ptr<std::int64_t>(), 1000},
                   {static_cast<std::byte*>(out.back().data_ptr()), out.back().nbytes()}, field);
    };
    for (const char* field : {"weight", "exp_avg", "exp_avg_sq"}) add(store.table("users"), users, field);
    for (const char* field : {"weight", "sum"}) add(store.table("items"), items, field);
    // The top of the model, without its tables.
    struct Top : torch::nn::Module {
      Top() {
        top = register_module("top",
                              torch::nn::Sequential(torch::nn::Linear(192, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1)));
      }
      torch::nn::Sequential top = nullptr;
    } model;
    nn::load(model, folder / "model.pt", {store}, {.strict = false});
    for (const torch::Tensor& parameter : model.parameters()) out.push_back(parameter.detach());
    return out;
  }
};

TEST_F(Recommender, GoesOnWhereItWasKilled) {
  const Outcome unbroken = run(folder_ / "unbroken", 60);
  ASSERT_EQ(unbroken.status, 0) << unbroken.text;
  EXPECT_THAT(unbroken.text, testing::Not(HasSubstr("goes on")));

  const Outcome killed = run(folder_ / "killed", 60, "step 20,");
  ASSERT_TRUE(WIFSIGNALED(killed.status)) << "it was done before it could be killed: " << killed.text;
  const Outcome again = run(folder_ / "killed", 60);
  ASSERT_EQ(again.status, 0) << again.text;
  EXPECT_THAT(again.text, HasSubstr("goes on at commit"));
  EXPECT_THAT(again.text, testing::Not(HasSubstr("step 20,")));

  const auto wanted = all_of(folder_ / "unbroken");
  const auto found = all_of(folder_ / "killed");
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(torch::equal(found[i], wanted[i])) << "tensor " << i;
}

}  // namespace
}  // namespace embermap
