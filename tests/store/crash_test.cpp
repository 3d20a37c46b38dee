// Trains a store, loses power at every moment, opens what is left, and compares it with what the commits said.
//
// The few seconds that ctest runs try a sample. For more, by the program itself, since ctest ends it after 5 minutes:
//   EMBERMAP_CRASH_RUNS=20 EMBERMAP_CRASH_POINTS=2000 EMBERMAP_CRASH_SEEDS=8 tests/store_crash_test
// RUNS: sessions, each with a seed of its own; POINTS: moments of each (all, if it has no more); SEEDS: disks of each moment,
// besides the special ones. EMBERMAP_CRASH_FIRST is the first session's seed; EMBERMAP_CRASH_KEEP=FOLDER keeps the disks that
// were wrong there, each with the list of what was done to files until then.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <optional>
#include <random>
#include <string>

#include "io/rows.hpp"
#include "store/initializer.hpp"
#include "tests/store/power_loss.hpp"
#include "tests/store/store_fixture.hpp"

namespace embermap::test {
namespace {

using Kept = PowerLoss::Kept;

// Without a log a store whose pages are ahead of its last commit is refused when it is opened.
constexpr bool kUncleanEndsAreRefused = false;

constexpr std::uint64_t kMemory = 96U << 10;  // a third of the tables: pages are evicted between commits
constexpr std::uint64_t kNever = UINT64_MAX;

std::uint64_t setting(const char* name, std::uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::stoull(text);
}

// --- what tables must hold ------------------------------------------------------------------------

struct Model {
  std::uint64_t rows = 0, dim = 0, step = 0, seed = 0;
  Optimizer optimizer = {};
  Initializer init = Zeros{};
  std::vector<float> weight = {}, sum = {};  // rows x dim; `sum` only with Adagrad

  bool trained() const { return std::holds_alternative<Adagrad>(optimizer); }
  void resize(std::uint64_t to) {
    weight.resize(to * dim);
    if (to > rows)
      generate_rows(init, seed, rows, to - rows, dim, DType::kFloat32, reinterpret_cast<std::byte*>(weight.data() + rows * dim),
                    dim * sizeof(float));
    if (trained()) sum.resize(to * dim, static_cast<float>(std::get<Adagrad>(optimizer).initial_accumulator_value));
    rows = to;
  }
  // Ids are distinct.
  void update(const std::vector<std::int64_t>& ids, const std::vector<float>& gradients) {
    const auto& adagrad = std::get<Adagrad>(optimizer);
    const auto lr = static_cast<float>(adagrad.lr / (1.0 + static_cast<double>(step) * adagrad.lr_decay));
    const auto eps = static_cast<float>(adagrad.eps);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const std::size_t at = static_cast<std::size_t>(ids[i / dim]) * dim + i % dim;
      sum[at] = sum[at] + gradients[i] * gradients[i];
      weight[at] = weight[at] - lr * gradients[i] / (std::sqrt(sum[at]) + eps);
    }
    ++step;
  }
  void scatter(std::vector<float>& field, const std::vector<std::int64_t>& ids, const std::vector<float>& values) const {
    for (std::size_t i = 0; i < values.size(); ++i) field[static_cast<std::size_t>(ids[i / dim]) * dim + i % dim] = values[i];
  }
};

using Models = std::map<std::string, Model>;

// What a store is to be from the moment when the call that makes it so has returned.
struct State {
  std::uint64_t commit = 0;
  Models tables;
  std::uint64_t begun = 0, done = kNever;  // how many changes were recorded then; kNever: the call failed
  std::string what;
  std::string note = {};  // of the commit
};

std::string compare_field(const Table& table, std::string_view field, const std::vector<float>& wanted) {
  const std::vector<float> found = read_all(table, field);
  if (found.size() != wanted.size()) return "another size";
  for (std::size_t i = 0; i < found.size(); ++i)
    if (std::bit_cast<std::uint32_t>(found[i]) != std::bit_cast<std::uint32_t>(wanted[i]))
      return fmt::format("{} of row {} of table '{}' is {}, not {}", field, i / table.dim(), table.name(), found[i], wanted[i]);
  return {};
}

// Empty if the store is in that state, else the first thing that differs.
std::string difference(Store& store, const State& state) {
  if (store.commit_number() != state.commit) return fmt::format("commit {}, not {}", store.commit_number(), state.commit);
  if (const std::string note = store.last_commit().note; note != state.note)
    return fmt::format("the note '{}', not '{}'", note, state.note);
  std::vector<std::string> names;
  for (const auto& [name, unused] : state.tables) names.push_back(name);
  if (store.tables() != names) return fmt::format("{} tables, not {}", store.tables().size(), names.size());
  for (const auto& [name, model] : state.tables) {
    const Table table = store.table(name);
    if (table.rows() != model.rows) return fmt::format("{} rows in '{}', not {}", table.rows(), name, model.rows);
    if (table.step() != model.step) return fmt::format("step {} of '{}', not {}", table.step(), name, model.step);
    if (model.trained() && std::get<Adagrad>(table.optimizer()).lr != std::get<Adagrad>(model.optimizer).lr)
      return fmt::format("another lr of '{}'", name);
    std::string differs = compare_field(table, "weight", model.weight);
    if (differs.empty() && model.trained()) differs = compare_field(table, "sum", model.sum);
    if (!differs.empty()) return differs;
  }
  return {};
}

std::string damage(Store& store) {
  for (const std::string& name : store.tables())
    if (const std::uint64_t bad = store.table(name).verify().bad_pages; bad != 0)
      return fmt::format("{} bad pages in '{}'", bad, name);
  return {};
}

// Rows in memory, as a file would have them.
class GivenRows final : public RowReader {
 public:
  GivenRows(std::vector<float> rows, std::uint64_t dim) : values_{std::move(rows)} {
    dim_ = dim;
    rows_ = values_.size() / dim;
  }
  std::string description() const override { return "given rows"; }
  void read(std::uint64_t first, std::uint64_t count, std::byte* out) override {
    std::memcpy(out, values_.data() + first * dim_, count * dim_ * sizeof(float));
  }
  std::uint64_t block_rows() const override { return 7; }

 private:
  std::vector<float> values_;
};

// --- a session of training ------------------------------------------------------------------------

// Changes a store and its model alike. `loss` counts what it does to files; nullptr: nobody counts.
class Training {
 public:
  Training(Store store, const PowerLoss* loss, std::uint64_t seed, State state = {})
      : store_{std::move(store)}, loss_{loss}, random_{seed}, now_{state.tables} {
    state.done = 0;  // whatever led to it: the store was opened so
    if (!state.tables.empty()) states_.push_back(std::move(state));
  }

  const std::vector<State>& states() const { return states_; }
  const State& last() const { return states_.back(); }
  Store& store() { return store_; }

  void opened(std::uint64_t begun) { states_.push_back({store_.commit_number(), {}, begun, changes(), "open"}); }

  void create(const std::string& name, std::uint64_t rows, std::uint64_t dim, const Optimizer& optimizer) {
    Model model{.dim = dim, .seed = random_(), .optimizer = optimizer, .init = Normal{0, 1}};
    model.resize(rows);
    const auto call = [&] {
      store_.create(name, {.rows = rows, .dim = dim, .optimizer = optimizer, .init = model.init, .seed = model.seed});
      now_.insert_or_assign(name, model);
    };
    Models committed = certain();
    committed.insert_or_assign(name, model);
    durably("create " + name, call, std::move(committed));
  }
  void remove(const std::string& name) {
    const auto call = [&] {
      store_.remove(name);
      now_.erase(name);
    };
    Models committed = certain();
    committed.erase(name);
    durably("remove " + name, call, std::move(committed));
  }
  void commit() {
    const std::string note = random_() % 2 == 0 ? "" : fmt::format(R"({{"step":{}}})", random_() % 1000);
    durably(
        "commit", [&] { store_.commit(note); }, std::nullopt, note);
  }
  void materialize(const std::string& name) {
    durably(
        "materialize " + name, [&, table = store_.table(name)]() mutable { table.materialize(); }, std::nullopt);
  }
  // A table whose rows come from a file.
  void import(const std::string& name, std::uint64_t rows, std::uint64_t dim) {
    Model model{.dim = dim, .seed = random_(), .optimizer = Adagrad{.lr = 0.2}};
    model.resize(rows);
    model.weight = numbers(rows * dim);
    const auto call = [&] {
      GivenRows given(model.weight, dim);
      store_.import(name, given, {.optimizer = model.optimizer, .seed = model.seed});
      now_.insert_or_assign(name, model);
    };
    Models committed = certain();
    committed.insert_or_assign(name, model);
    durably("import " + name, call, std::move(committed));
  }
  // Rows of files, with their state.
  void append_rows(const std::string& name, std::uint64_t rows) {
    Model model = now_.at(name);
    const std::uint64_t before = model.rows * model.dim;
    model.resize(model.rows + rows);
    GivenRows weights(numbers(rows * model.dim), model.dim), sums(numbers(rows * model.dim), model.dim);
    Table::NewRows given{{"weight", &weights}};
    weights.read(0, rows, reinterpret_cast<std::byte*>(model.weight.data() + before));
    if (model.trained()) {
      given.emplace("sum", &sums);
      sums.read(0, rows, reinterpret_cast<std::byte*>(model.sum.data() + before));
    }
    Table table = store_.table(name);
    resized("append rows to " + name, name, std::move(model), [&] { table.append_rows(given); });
  }
  // What others see beside the session is its last commit.
  void look_beside() {
    if (last().done == kNever) return;  // of a call that failed, others may see this or that
    const std::filesystem::path store = store_.path();
    if (!reader_ || random_() % 4 == 0)
      reader_ = Store::open(store, {.mode = StoreOptions::Mode::kRead, .memory = kMemory, .threads = 1});
    else
      reader_->refresh();
    EXPECT_EQ(difference(*reader_, last()), "") << "of a reader beside, after " << last().what;
    if (random_() % 3 != 0) return;
    const TemporaryDirectory folder(memory_folder());  // where nobody loses power
    store_.snapshot(folder / "copy");
    Store copy = Store::open(folder / "copy", {.mode = StoreOptions::Mode::kRead, .memory = kMemory, .threads = 1});
    EXPECT_EQ(difference(copy, last()), "") << "of a snapshot, after " << last().what;
  }
  void append(const std::string& name, std::uint64_t rows) {
    Model model = now_.at(name);
    const std::vector<float> weights = numbers(rows * model.dim);
    const std::uint64_t before = model.rows;
    model.resize(before + rows);
    std::copy(weights.begin(), weights.end(), model.weight.begin() + static_cast<std::ptrdiff_t>(before * model.dim));
    Table table = store_.table(name);
    resized("append to " + name, name, std::move(model), [&] { table.append(std::as_bytes(std::span(weights))); });
  }
  void resize(const std::string& name, std::uint64_t rows) {
    Model model = now_.at(name);
    model.resize(rows);
    Table table = store_.table(name);
    resized(fmt::format("resize {} to {}", name, rows), name, std::move(model), [&] { table.resize(rows); });
  }
  void change_lr(const std::string& name) {
    Optimizer optimizer = now_.at(name).optimizer;
    std::get<Adagrad>(optimizer).lr = 0.01 * static_cast<double>(1 + random_() % 9);
    store_.table(name).set_optimizer(optimizer);
    now_.at(name).optimizer = optimizer;
  }
  // One call that changes rows of a table that is there.
  void train() {
    const std::string name = any_table();
    Model& model = now_.at(name);
    if (model.rows == 0) return;
    Table table = store_.table(name);
    const auto ids = some_ids(model.rows);
    const auto values = numbers(ids.size() * model.dim);
    table.prefetch(some_ids(model.rows));
    switch (random_() % 8) {
      case 0:
        test::scatter(table, ids, values);
        model.scatter(model.weight, ids, values);
        break;
      case 1:  // past the hot pages
        write_some(table, model);
        break;
      case 2:
        if (model.trained()) {
          const std::vector<float> squares(values.size(), 2.5F);
          test::scatter(table, ids, squares, "sum");
          model.scatter(model.sum, ids, squares);
        }
        break;
      default:
        if (!model.trained()) {
          test::scatter(table, ids, values);
          model.scatter(model.weight, ids, values);
        } else {
          test::update(table, ids, values);
          model.update(ids, values);
        }
    }
  }
  // What changes which tables there are, or how many rows they have.
  void change_tables() {
    const std::string name = any_table();
    switch (random_() % 6) {
      case 0: return append(name, 1 + random_() % 60);
      case 1: return resize(name, std::max<std::uint64_t>(1, now_.at(name).rows / 2 + random_() % (now_.at(name).rows + 1)));
      case 2: return now_.contains("c") ? remove("c") : create("c", 1 + random_() % 400, 3, {});
      case 3: return append_rows(name, 1 + random_() % 90);
      case 4: return now_.contains("d") ? remove("d") : import("d", 1 + random_() % 300, 7);
      default: return store_.checkpoint();
    }
  }
  // Anything, in the shares in which it happens.
  void step() {
    const std::uint64_t dice = random_() % 100;
    const std::string name = any_table();
    const std::uint64_t rows = now_.at(name).rows;
    if (dice < 10)
      commit();
    else if (dice < 12)
      append(name, 1 + random_() % 60);
    else if (dice < 14)
      resize(name, std::max<std::uint64_t>(1, rows / 2 + random_() % (rows + 1)));
    else if (dice < 16)
      now_.contains("c") ? remove("c") : create("c", 1 + random_() % 400, 3, {});
    else if (dice < 18 && now_.at(name).trained())
      change_lr(name);
    else if (dice < 20)
      append_rows(name, 1 + random_() % 90);
    else if (dice < 21)
      now_.contains("d") ? remove("d") : import("d", 1 + random_() % 300, 7);
    else if (dice < 22)
      store_.checkpoint();
    else if (dice < 23)
      materialize(name);
    else if (dice < 26)
      look_beside();
    else
      train();
  }
  // After a call that failed in the middle: of a batch that needs more pages than there are frames, a part may be done.
  void believe_the_store() {
    std::erase_if(now_, [&](const auto& item) { return !store_.contains(item.first); });
    for (auto& [name, model] : now_) {
      const Table table = store_.table(name);
      model.rows = table.rows();
      model.weight = read_all(table);
      if (model.trained()) model.sum = read_all(table, "sum");
      model.step = table.step();
    }
  }

 private:
  // What is committed of the tables that there are, as far as calls that returned tell.
  Models certain() const {
    const auto done = std::find_if(states_.rbegin(), states_.rend(), [](const State& state) { return state.done != kNever; });
    Models tables = done == states_.rend() ? Models() : done->tables;
    std::erase_if(tables, [&](const auto& item) { return !now_.contains(item.first); });
    return tables;
  }
  std::uint64_t changes() const { return loss_ == nullptr ? 0 : loss_->count(); }
  std::string any_table() {
    auto at = now_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random_() % now_.size()));
    return at->first;
  }
  // Distinct; most among the first rows, so that some pages stay in memory.
  std::vector<std::int64_t> some_ids(std::uint64_t rows) {
    std::vector<std::int64_t> ids;
    for (std::uint64_t i = 1 + random_() % 12; i > 0; --i)
      ids.push_back(static_cast<std::int64_t>(random_() % (random_() % 2 == 0 ? rows : std::max<std::uint64_t>(1, rows / 8))));
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }
  std::vector<float> numbers(std::uint64_t count) {
    std::vector<float> out(count);
    std::uniform_real_distribution<float> number(-2, 2);
    for (float& x : out) x = number(random_);
    return out;
  }
  void write_some(Table table, Model& model) {
    const std::uint64_t first = random_() % model.rows;
    const std::uint64_t count = std::min<std::uint64_t>(model.rows - first, 1 + random_() % 100);
    const auto values = numbers(count * model.dim);
    table.write(first, count, std::as_bytes(std::span(values)));
    std::copy(values.begin(), values.end(), model.weight.begin() + static_cast<std::ptrdiff_t>(first * model.dim));
  }
  // `call` makes something durable: the tables `committed` if it takes no number, else all as they are then, with this note.
  template <class Call>
  void durably(std::string what, Call call, std::optional<Models> committed, const std::string& note = {}) {
    const std::uint64_t begun = changes(), number = store_.commit_number();
    const std::string before = states_.empty() ? "" : last().note;
    try {
      call();
    } catch (...) {
      if (committed) states_.push_back({number, *committed, begun, kNever, what + ", which failed", before});
      states_.push_back({number + 1, now_, begun, kNever, what + ", which failed", note});
      throw;
    }
    const bool numbered = store_.commit_number() != number, all = !committed || numbered;
    states_.push_back({store_.commit_number(), all ? now_ : *std::move(committed), begun, changes(), std::move(what),
                       numbered ? note : before});
  }
  // A resize commits what there was, if there was anything, and then the new size.
  template <class Call>
  void resized(const std::string& what, const std::string& name, Model model, Call call) {
    const std::uint64_t begun = changes(), number = store_.commit_number();
    const Models before = now_;
    Models after = now_, cut = certain();
    const bool smaller = model.rows < before.at(name).rows;
    cut.at(name).resize(std::min(cut.at(name).rows, model.rows));
    after.at(name) = std::move(model);
    const auto push = [&, note = last().note](std::uint64_t commit, const Models& tables, std::uint64_t done) {
      states_.push_back({commit, tables, begun, done, what, commit == number ? note : ""});
    };
    // A table becomes smaller before that is committed: forgotten rows do not come back.
    const auto push_steps = [&](bool both, std::uint64_t done) {
      if (smaller) push(number, cut, done);
      if (both) push(number + 1, before, done);
      if (both && smaller) push(number + 1, after, done);
    };
    try {
      call();
    } catch (...) {
      push_steps(true, kNever);
      if (store_.commit_number() == number + 1 && store_.table(name).rows() == before.at(name).rows)
        push(number + 1, before, changes());
      push(number + 1, after, kNever);
      push(number + 2, after, kNever);
      throw;
    }
    push_steps(store_.commit_number() > number + 1, changes());
    push(store_.commit_number(), after, changes());
    now_ = std::move(after);
  }

  Store store_;
  const PowerLoss* loss_;
  std::mt19937_64 random_;
  Models now_;
  std::vector<State> states_;
  std::optional<Store> reader_;  // beside it
};

// --- crashes --------------------------------------------------------------------------------------

struct Tally {
  std::uint64_t points = 0, disks = 0, opened = 0, refused = 0, nothing = 0, went_on = 0, recoveries = 0, mismatches = 0;
  std::string text() const {
    return fmt::format(
        "{} points, {} disks: {} opened as committed, {} before there was a store, {} refused; {} trained on, {} "
        "crashes while opening; {} mismatches",
        points, disks, opened, nothing, refused, went_on, recoveries, mismatches);
  }
};

class CrashTest : public ::testing::Test {
 protected:
  TemporaryDirectory directory_{memory_folder()};
  Tally tally_;
  std::string changes_;  // of the session, a line each
  void TearDown() override { std::printf("%s\n", tally_.text().c_str()); }

  std::filesystem::path live() const { return directory_ / "live"; }
  std::filesystem::path disk() const { return directory_ / "disk"; }
  std::filesystem::path second() const { return directory_ / "second"; }

  static StoreOptions options(std::uint64_t memory, FileOps* ops, bool write_behind = true) {
    return {.mode = StoreOptions::Mode::kReadWrite,
            .memory = memory,
            .write_behind = write_behind,
            .threads = 1,
            .io = IoEngine::kThreads,
            .direct = false,
            .file_ops = ops};
  }

  void wrong(const std::string& where, const std::string& what, const std::filesystem::path& folder) {
    if (const char* keep = std::getenv("EMBERMAP_CRASH_KEEP"); keep != nullptr && tally_.mismatches < 10) {
      const std::filesystem::path kept = std::filesystem::path(keep) / std::to_string(tally_.mismatches);
      std::filesystem::copy(folder, kept, std::filesystem::copy_options::recursive);
      write_text(kept / "what", where + ": " + what + "\n" + changes_);
    }
    if (++tally_.mismatches <= 10) ADD_FAILURE() << where << ": " << what;
  }

  // Opens the store in `folder` and says which of the states it is in: nullptr if it is refused or not there, which is counted,
  // or in none of them, which is a failure.
  const State* open_and_compare(const std::vector<const State*>& allowed, bool may_be_missing, const std::string& where,
                                const std::filesystem::path& folder, std::uint64_t memory,
                                StoreOptions::Mode mode = StoreOptions::Mode::kReadWrite) {
    try {
      StoreOptions how = options(memory, nullptr);
      how.mode = mode;
      Store store = Store::open(folder / "s", how);
      std::string differs;
      for (const State* state : allowed) {
        std::string one = difference(store, *state);
        if (!one.empty()) {
          differs += fmt::format("\n  after '{}' (commit {}): {}", state->what, state->commit, one);
          continue;
        }
        if (const std::string bad = damage(store); !bad.empty()) {
          wrong(where, bad, folder);
          return nullptr;
        }
        return state;
      }
      wrong(where, "in none of the states that it can be in:" + differs, folder);
    } catch (const NotFound& error) {
      if (!may_be_missing) wrong(where, error.what(), folder);
      ++tally_.nothing;
    } catch (const CorruptError& error) {
      if (kUncleanEndsAreRefused && std::string_view(error.what()).find("after its last commit") != std::string_view::npos)
        ++tally_.refused;
      else
        wrong(where, error.what(), folder);
    } catch (const std::exception& error) {
      wrong(where, error.what(), folder);
    }
    return nullptr;
  }

  static std::vector<const State*> states_at(const std::vector<State>& states, std::uint64_t point) {
    std::size_t last = 0;
    bool any = false;
    for (std::size_t i = 0; i < states.size(); ++i)
      if (states[i].done <= point) last = i, any = true;
    std::vector<const State*> out;
    for (std::size_t i = any ? last : 0; i < states.size(); ++i)
      if (states[i].begun <= point) out.push_back(&states[i]);
    return out;
  }

  // What the recovered store does must be kept, too.
  void go_on(const State& state, const std::string& where, std::uint64_t seed) {
    try {
      State last;
      {
        Training training(Store::open(disk() / "s", options(kMemory, nullptr, seed % 2 == 0)), nullptr, seed, state);
        // What a crash left of a table that was being created or removed does not keep its name.
        if (!state.tables.contains("c")) training.create("c", 100, 3, {});
        for (int i = 0; i < 12; ++i) training.step();
        training.commit();
        last = training.last();
        if (seed % 3 != 0) training.store().close();
      }
      if (open_and_compare({&last}, false, where + ", trained on and opened again", disk(), 1U << 20) != nullptr)
        ++tally_.went_on;
    } catch (const std::exception& error) {
      wrong(where + ", trained on", error.what(), disk());
    }
  }

  // Power is lost once more while the store is being opened.
  void crash_while_opening(const State& state, const std::string& where, std::uint64_t seed) {
    PowerLoss loss(disk());
    try {
      Store::open(disk() / "s", options(kMemory, &loss)).abandon();
    } catch (const std::exception& error) {
      wrong(where + ", opened while its calls were recorded", error.what(), disk());
      return;
    }
    PowerLoss::Disk disks(loss);
    for (std::uint64_t point = 0; point <= loss.count(); ++point) {
      if (loss.count() > 12 && point % (loss.count() / 12) != seed % (loss.count() / 12) && point != loss.count()) continue;
      for (const Kept kept : {Kept::kNothing, Kept::kTornLast, Kept::kRandom}) {
        disks.make(point, kept, seed, second());
        const std::string again =
            fmt::format("{}; again while opening, before {}, {}", where, loss.describe(point), kept_name(kept));
        if (open_and_compare({&state}, false, again, second(), 1U << 20) != nullptr) ++tally_.recoveries;
      }
    }
  }

  // A call fails while the store is being opened; it is opened again, in the same state, also if power is lost in between.
  // `make` makes the disk.
  void fail_while_opening(const State& state, const std::string& where, const std::function<void()>& make, std::uint64_t seed) {
    const std::uint64_t stride = 1 + seed % 4;
    for (std::uint64_t call = seed % stride;; call += stride) {
      const auto fault = static_cast<PowerLoss::Fault>((seed + call) % 5);
      make();
      PowerLoss loss(disk());
      loss.fail(call, fault);
      try {
        Store::open(disk() / "s", options(kMemory, &loss)).abandon();
      } catch (const IoError&) {
      } catch (const std::exception& error) {
        wrong(where + ", opened while a call failed", error.what(), disk());
      }
      if (!loss.has_failed()) return;
      const std::string again = fmt::format("{}; call {} of opening it failed", where, call);
      PowerLoss::Disk(loss).make(loss.count(), Kept::kRandom, seed + call, second());
      if (open_and_compare({&state}, false, again + ", power was lost", second(), 1U << 20) != nullptr) ++tally_.recoveries;
      if (open_and_compare({&state}, false, again, disk(), 1U << 20) != nullptr) ++tally_.recoveries;
    }
  }

  void try_point(const PowerLoss& loss, PowerLoss::Disk& disks, const std::vector<State>& states, std::uint64_t point,
                 std::uint64_t seeds, std::uint64_t run) {
    ++tally_.points;
    changes_.clear();
    for (std::uint64_t i = 0; std::getenv("EMBERMAP_CRASH_KEEP") != nullptr && i < point; ++i)
      changes_ += fmt::format("{} {}\n", i, loss.describe(i));
    const auto allowed = states_at(states, point);
    const bool may_be_missing = states.front().done > point;
    const auto try_disk = [&](Kept kept, std::uint64_t seed) {
      const auto make = [&] { disks.make(point, kept, seed, disk()); };
      make();
      ++tally_.disks;
      const std::string where = fmt::format("run {}, point {} of {} (before {}), {}, seed {}", run, point, loss.count(),
                                            loss.describe(point), kept_name(kept), seed);
      const std::uint64_t turn = tally_.disks;
      const State* seen = nullptr;
      if (turn % 3 == 0)
        seen = open_and_compare(allowed, may_be_missing, where + ", read", disk(), kMemory, StoreOptions::Mode::kRead);
      const State* state = open_and_compare(allowed, may_be_missing, where, disk(), turn % 2 == 0 ? kMemory : 1U << 20);
      if (seen != nullptr && state != nullptr && !same(*seen, *state))
        wrong(where, "a reader saw another commit than the writer after it", disk());
      if (state == nullptr || state->tables.empty()) return;
      ++tally_.opened;
      if (turn % 5 == 0) {
        go_on(*state, where, run * 1000 + turn);
      } else if (turn % 5 == 1) {
        make();
        crash_while_opening(*state, where, turn);
      } else if (turn % 5 == 2) {
        fail_while_opening(*state, where, make, turn);
      }
    };
    for (const Kept kept : {Kept::kNothing, Kept::kEverything, Kept::kMetadata, Kept::kData, Kept::kTornLast}) try_disk(kept, 0);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) try_disk(Kept::kRandom, seed);
  }

  static bool same(const State& a, const State& b) {
    return a.commit == b.commit && std::equal(a.tables.begin(), a.tables.end(), b.tables.begin(), b.tables.end(),
                                              [](const auto& x, const auto& y) { return x.first == y.first; });
  }

  static Training begin(const std::filesystem::path& live, PowerLoss& loss, std::uint64_t run) {
    StoreOptions how = options(kMemory, &loss, /*write_behind=*/run % 2 == 0);
    how.mode = StoreOptions::Mode::kOpenOrCreate;
    Training training(Store::open(live / "s", how), &loss, run);
    training.opened(0);
    training.create("a", 1500, 16, Adagrad{.lr = 0.05, .lr_decay = 0.01, .initial_accumulator_value = 0.25});
    training.create("b", 900, 5, Adagrad{.lr = 0.1});
    return training;
  }
};

TEST_F(CrashTest, EveryMomentOfASessionLeavesACommit) {
  const std::uint64_t runs = setting("EMBERMAP_CRASH_RUNS", 2), first = setting("EMBERMAP_CRASH_FIRST", 0);
  const std::uint64_t points = setting("EMBERMAP_CRASH_POINTS", 20), seeds = setting("EMBERMAP_CRASH_SEEDS", 2);
  std::uint64_t evicted = 0;
  for (std::uint64_t run = first; run < first + runs; ++run) {
    std::filesystem::remove_all(live());
    std::filesystem::create_directories(live() / "s");
    PowerLoss loss(live());
    Training training = begin(live(), loss, run);
    for (int i = 0; i < 150; ++i) training.step();
    for (const std::string name : {"a", "b"}) evicted += training.store().table(name).stats().evictions;
    if (run % 3 == 0) {
      training.commit();
      training.store().close();
    }
    training.store().abandon();

    PowerLoss::Disk disks(loss);
    std::vector<std::uint64_t> all(loss.count() + 1), some;
    std::iota(all.begin(), all.end(), 0);
    std::mt19937_64 random(run);
    std::sample(all.begin(), all.end(), std::back_inserter(some), points, random);
    for (const std::uint64_t point : some) try_point(loss, disks, training.states(), point, seeds, run);
  }
  EXPECT_GT(evicted, 50U) << "pages are to be written between commits";
  EXPECT_GT(tally_.opened, tally_.disks / 20);
  EXPECT_GT(tally_.went_on, 0U);
  EXPECT_GT(tally_.recoveries, 0U);
  EXPECT_EQ(tally_.mismatches, 0U);
}

// A call fails, the session goes on as it can, and power is lost later.
TEST_F(CrashTest, AFailedCallLosesNoCommit) {
  using Fault = PowerLoss::Fault;
  const std::uint64_t tries = setting("EMBERMAP_CRASH_POINTS", 20) / 2;
  std::mt19937_64 random(setting("EMBERMAP_CRASH_FIRST", 0));
  std::uint64_t failed = 0;
  for (std::uint64_t run = 0; run < tries; ++run) {
    std::filesystem::remove_all(live());
    std::filesystem::create_directories(live() / "s");
    PowerLoss loss(live());
    Training training = begin(live(), loss, run);
    const std::uint64_t begun = loss.count();
    const auto fault = static_cast<Fault>(run % 5);
    loss.fail(random() % 150, fault);
    try {
      for (int i = 0; i < 40; ++i) {
        try {
          random() % 4 == 0 ? training.commit() : random() % 2 == 0 ? training.train() : training.change_tables();
        } catch (const IoError& error) {
          EXPECT_TRUE(error.error_number() == EIO || error.error_number() == ENOSPC) << error.what();
          ++failed;
          training.believe_the_store();
        } catch (const AlreadyExists&) {
          // a file that a call which failed could not remove
        }
      }
    } catch (const CorruptError& error) {  // after a sync that failed, or half of a batch, nothing but what was committed before
      EXPECT_THAT(error.what(), ::testing::AnyOf(::testing::HasSubstr("a sync has failed"),
                                                 ::testing::HasSubstr("was changed in part and then failed")));
    }
    training.store().abandon();
    PowerLoss::Disk disks(loss);
    for (int i = 0; i < 3; ++i)
      try_point(loss, disks, training.states(), i == 0 ? loss.count() : begun + random() % (loss.count() - begun), 1, run);
  }
  EXPECT_GT(failed, tries / 4);
  EXPECT_EQ(tally_.mismatches, 0U);
}

}  // namespace
}  // namespace embermap::test
