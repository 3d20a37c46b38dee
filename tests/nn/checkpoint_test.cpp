#include "nn/checkpoint.hpp"

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <cstdlib>
#include <fstream>

#include "nn/embedding.hpp"
#include "nn/optimizers.hpp"
#include "tests/nn/table_fixture.hpp"

namespace embermap {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

struct Model : torch::nn::Module {
  explicit Model(const Table& table)
      : embedding{register_module("embedding", nn::Embedding(table))},
        linear{register_module("linear", torch::nn::Linear(4, 2))},
        norm{register_module("norm", torch::nn::BatchNorm1d(2))} {}
  torch::Tensor forward(const torch::Tensor& some) { return norm(linear(embedding(some))); }
  nn::Embedding embedding;
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
};

class CheckpointTest : public TableTest {
 protected:
  std::filesystem::path file() const { return folder_ / "model.pt"; }
  Table items() {
    if (store().contains("items")) return store().table("items");
    return store().create(
        "items", {.rows = 50, .dim = 4, .optimizer = nn::AdamOptions(0.05), .init = Normal{.mean = 0, .std = 1}, .seed = 3});
  }
  void reopen(StoreOptions::Mode mode = StoreOptions::Mode::kReadWrite) {
    if (store_) store_->close();
    store_ = Store::open(folder_ / "store", {.mode = mode, .memory = 64ULL << 20});
  }
  // As after SIGKILL.
  void lose_what_is_not_committed() {
    store_->abandon();
    store_.reset();
    reopen();
  }
  static void train(Model& model, const std::vector<torch::optim::Optimizer*>& optimizers, int steps) {
    for (int step = 0; step < steps; ++step) {
      for (auto* optimizer : optimizers) optimizer->zero_grad();
      (model.forward(torch::randint(0, 50, {16}, torch::kInt64)) - torch::randn({16, 2})).pow(2).sum().backward();
      for (auto* optimizer : optimizers) optimizer->step();
    }
  }
  static std::vector<torch::Tensor> all_of(Model& model) {
    std::vector<torch::Tensor> out{weights(model.embedding->table()), weights(model.embedding->table(), "exp_avg_sq")};
    for (const auto& entry : model.named_parameters()) out.push_back(entry.value().detach().clone());
    for (const auto& entry : model.named_buffers()) out.push_back(entry.value().detach().clone());
    return out;
  }
  struct Optimizers {
    explicit Optimizers(Model& model)
        : rows(nn::table_parameters(model)), dense(nn::dense_parameters(model), torch::optim::AdamOptions(0.01)) {}
    std::vector<torch::optim::Optimizer*> both() { return {&rows, &dense}; }
    nn::TableOptimizer rows;
    torch::optim::Adam dense;
  };
  nn::Checkpoint save(Model& model, Optimizers& optimizers, const std::string& note = {}) {
    return nn::save(model, file(), {store()}, {.optimizers = {&optimizers.rows, &optimizers.dense}, .note = note});
  }
};

TEST_F(CheckpointTest, ResumedTrainingIsBitEqualToUnbroken) {
  std::vector<torch::Tensor> unbroken;
  {
    torch::manual_seed(5);
    Model model(items());
    Optimizers optimizers(model);
    train(model, optimizers.both(), 6);
    optimizers.rows.set_lr(0.01);
    const auto saved = save(model, optimizers, R"({"epoch": 3, "what": [1, 2.5, null, true, {"a": "ä"}]})");
    EXPECT_EQ(saved.commits, std::vector{store().commit_number()});
    train(model, optimizers.both(), 6);
    unbroken = all_of(model);
  }
  lose_what_is_not_committed();
  torch::manual_seed(99);
  Model model(items());
  Optimizers optimizers(model);
  const auto found = nn::load(model, file(), {store()}, {.optimizers = optimizers.both(), .rng = true});
  EXPECT_EQ(found.note, R"({"epoch":3,"what":[1,2.5,null,true,{"a":"ä"}]})");
  EXPECT_EQ(optimizers.rows.lr(), 0.01);
  train(model, optimizers.both(), 6);
  const auto resumed = all_of(model);
  ASSERT_EQ(resumed.size(), unbroken.size());
  for (std::size_t i = 0; i < resumed.size(); ++i) EXPECT_TRUE(same(resumed[i], unbroken[i])) << "tensor " << i;
}

TEST_F(CheckpointTest, AtAnyMomentOneOfTheFilesIsOfTheLastCommit) {
  Model model(items());
  Optimizers optimizers(model);
  train(model, optimizers.both(), 1);
  save(model, optimizers);
  const auto first = all_of(model);
  train(model, optimizers.both(), 1);
  std::filesystem::copy_file(file(), folder_ / "first.pt");
  save(model, optimizers);
  const auto second = all_of(model);
  std::filesystem::copy_file(file(), folder_ / "second.pt");
  const auto loads = [&](const std::vector<torch::Tensor>& wanted) {
    Model again(items());
    nn::load(again, file(), {store()});
    const auto found = all_of(again);
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same(found[i], wanted[i])) << "tensor " << i;
  };
  // Killed after the commit, before the file had its name.
  std::filesystem::rename(file(), folder_ / "model.pt.next");
  std::filesystem::copy_file(folder_ / "first.pt", file());
  loads(second);
  // Killed before the commit: the complete file of a commit that never was.
  train(model, optimizers.both(), 1);
  save(model, optimizers);  // gives the one before its name first
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model.pt.next"));
  const auto third = all_of(model);
  std::filesystem::copy_file(folder_ / "first.pt", folder_ / "model.pt.next");
  loads(third);
}

TEST_F(CheckpointTest, RefusesAStoreThatHasGoneOnOrChanged) {
  Model model(items());
  Optimizers optimizers(model);
  train(model, optimizers.both(), 1);
  save(model, optimizers);
  const torch::Tensor weight = model.linear->weight.detach().clone();
  const auto refuse = [&] { return text_of<c10::ValueError>([&] { nn::load(model, file(), {store()}); }); };
  train(model, {&optimizers.rows}, 1);
  EXPECT_THAT(refuse(), AllOf(HasSubstr("has changes since commit"), HasSubstr("step 2, not 1")));
  const auto number = store().commit();
  EXPECT_THAT(refuse(), AllOf(HasSubstr("at commit " + std::to_string(number)), HasSubstr("cannot go back")));
  EXPECT_TRUE(same(model.linear->weight.detach(), weight));
  EXPECT_THAT(text_of<NotFound>([&] { nn::load(model, folder_ / "none.pt", {store()}); }), HasSubstr("none.pt"));
}

TEST_F(CheckpointTest, RefusesAnotherModelAndChangesNothing) {
  Model model(items());
  Optimizers optimizers(model);
  save(model, optimizers);
  struct Other : torch::nn::Module {
    explicit Other(const Table& table)
        : embedding{register_module("embedding", nn::Embedding(table))},
          linear{register_module("linear", torch::nn::Linear(4, 3))},
          more{register_module("more", torch::nn::Linear(1, 1))} {}
    nn::Embedding embedding;
    torch::nn::Linear linear, more;
  } other(items());
  const torch::Tensor before = other.linear->bias.detach().clone();
  const std::string text = text_of<c10::ValueError>([&] { nn::load(other, file(), {store()}); });
  EXPECT_THAT(
      text, AllOf(HasSubstr("Error(s) in loading state_dict"), HasSubstr("Missing key(s) in state_dict"), HasSubstr("more.bias"),
                  HasSubstr("Unexpected key(s)"), HasSubstr("norm.running_mean"), HasSubstr("size mismatch for linear.bias")));
  EXPECT_TRUE(same(other.linear->bias.detach(), before));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::load(model, file(), {store()}, {.optimizers = {&optimizers.rows}}); }),
              HasSubstr("2 states of optimizers, given are 1"));
}

TEST_F(CheckpointTest, RefusesWhatCannotBeSaved) {
  Model model(items());
  Optimizers optimizers(model);
  const auto refuse = [&](const std::string& note) {
    return text_of<c10::ValueError>([&] { nn::save(model, file(), {store()}, {.note = note}); });
  };
  EXPECT_THAT(refuse("[1]"), HasSubstr("JSON object"));
  EXPECT_THAT(refuse("{"), HasSubstr("JSON object"));
  EXPECT_THAT(refuse(R"({"embermap.torch": 1})"), HasSubstr("for embermap itself"));
  EXPECT_THAT(refuse(R"({"a": 18446744073709551615})"), HasSubstr("18446744073709551615"));
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::save(model, file(), {}); }), HasSubstr("no store"));
  Store other = Store::open(folder_ / "other");
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::save(model, file(), {other}); }), HasSubstr("table 'items'"));
  other.close();
  EXPECT_THAT(text_of<IoError>([&] { nn::save(model, folder_ / "no" / "model.pt", {store()}); }), HasSubstr("No such file"));
  EXPECT_FALSE(std::filesystem::exists(file()));
  const auto number = store().commit_number();
  reopen(StoreOptions::Mode::kRead);
  Model reader(items());
  EXPECT_THROW(nn::save(reader, file(), {store()}), ReadOnlyError);
  EXPECT_EQ(store().commit_number(), number);
}

TEST_F(CheckpointTest, RefusesFilesThatAreNoCheckpoints) {
  Model model(items());
  Optimizers optimizers(model);
  save(model, optimizers);
  std::filesystem::resize_file(file(), std::filesystem::file_size(file()) / 2);
  EXPECT_THAT(text_of<FormatError>([&] { nn::load(model, file(), {store()}); }), HasSubstr("model.pt"));
  std::ofstream(file()) << "no archive";
  EXPECT_THAT(text_of<FormatError>([&] { nn::load(model, file(), {store()}); }), HasSubstr("model.pt"));
  const auto bytes = torch::jit::pickle_save(torch::ones({2}));
  std::ofstream(file(), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  EXPECT_THAT(text_of<FormatError>([&] { nn::load(model, file(), {store()}); }), HasSubstr("no file of embermap::nn::save"));
}

TEST_F(CheckpointTest, AReaderServesWhatWasSaved) {
  Model model(items());
  Optimizers optimizers(model);
  train(model, optimizers.both(), 2);
  save(model, optimizers);
  const torch::Tensor weight = model.linear->weight.detach().clone();
  reopen(StoreOptions::Mode::kRead);
  Model reader(items());
  nn::load(reader, file(), {store()});
  EXPECT_TRUE(same(reader.linear->weight.detach(), weight));
}

// Python, with the embermap package of this tree or an installed one.
class PythonTest : public CheckpointTest {
 protected:
  static int python(const std::filesystem::path& script) {
    return std::system(("'" EMBERMAP_PYTHON_EXECUTABLE "' '" + script.native() + "'").c_str());
  }
  void SetUp() override {
    const auto script = folder_ / "probe.py";
    std::ofstream(script) << "import importlib.util as u, sys\nsys.exit(0 if u.find_spec('embermap') else 3)\n";
    if (python(script) != 0) GTEST_SKIP() << "the Python that has torch has no embermap";
  }
};

TEST_F(PythonTest, ReadsFilesOfCppAndCppThoseOfPython) {
  {
    Model model(items());
    Optimizers optimizers(model);
    train(model, optimizers.both(), 2);
    const torch::NoGradGuard no_grad;
    model.linear->weight.fill_(0.75);
    save(model, optimizers, R"({"from": "C++"})");
    store().close();
    store_.reset();
  }
  const auto script = folder_ / "both.py";
  std::ofstream(script) << R"(
import pathlib, torch, embermap as em, embermap.torch
folder = pathlib.Path(')"
                        << folder_.native() << R"(')
store = em.open(folder / "store", memory="64MiB")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = em.torch.Embedding(store["items"])
        self.linear = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
model = Model()
found = em.torch.load(model, folder / "model.pt", rng=True)
assert found.note == {"from": "C++"}, found
assert (model.linear.weight == 0.75).all()
assert store["items"].step == 2
assert int(model.norm.num_batches_tracked) == 2
torch.load(folder / "model.pt", weights_only=True)
optimizer = em.torch.Optimizer(model.embedding)
optimizer.zero_grad()
model.norm(model.linear(model.embedding(torch.tensor([1, 2])))).square().sum().backward()
optimizer.step()
with torch.no_grad():
    model.linear.weight.fill_(0.25)
em.torch.save(model, folder / "model.pt", optimizer=optimizer, note={"from": "Python", "list": [1, 2.5, None]})
store.close()
)";
  ASSERT_EQ(python(script), 0);
  Model model(items());
  Optimizers optimizers(model);
  const auto found = nn::load(model, file(), {store()}, {.rng = true});
  EXPECT_EQ(found.note, R"({"from":"Python","list":[1,2.5,null]})");
  EXPECT_TRUE(same(model.linear->weight.detach(), torch::full({2, 4}, 0.25)));
  EXPECT_EQ(model.embedding->table().step(), 3U);
  EXPECT_EQ(model.norm->num_batches_tracked.item<std::int64_t>(), 3);
  EXPECT_THAT(text_of<c10::ValueError>([&] { nn::load(model, file(), {store()}, {.optimizers = optimizers.both()}); }),
              HasSubstr("written by Python"));
}

}  // namespace
}  // namespace embermap
