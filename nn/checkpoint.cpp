#include "nn/checkpoint.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/cuda.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include "io/file.hpp"
#include "nn/errors.hpp"
#include "nn/pending_gradients.hpp"

namespace embermap::nn {
namespace {

using detail::as_torch;
using detail::refuse;
using Json = nlohmann::json;
using Path = std::filesystem::path;

constexpr std::int64_t kVersion = 1;
constexpr const char* kKey = "embermap.torch";  // in the note of a commit: the token of the file

std::string quoted(const Path& path) { return "'" + printable(path) + "'"; }
std::string text_of(const Store& store) { return "store " + quoted(store.path()); }

// --- values -----------------------------------------------------------------------------------------------------------------

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

Dict new_dict() { return Dict(c10::StringType::get(), c10::AnyType::get()); }
List new_list() { return List(c10::AnyType::get()); }

c10::IValue value_of(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null: return {};
    case Json::value_t::boolean: return json.get<bool>();
    case Json::value_t::number_integer: return json.get<std::int64_t>();
    case Json::value_t::number_unsigned:
      if (json.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
        refuse<c10::ValueError>("the note has the number ", json.get<std::uint64_t>(), ", which files of torch do not hold");
      return json.get<std::int64_t>();
    case Json::value_t::number_float: return json.get<double>();
    case Json::value_t::string: return json.get<std::string>();
    case Json::value_t::array: {
      List list = new_list();
      for (const Json& item : json) list.push_back(value_of(item));
      return list;
    }
    case Json::value_t::object: {
      Dict dict = new_dict();
      for (const auto& [key, item] : json.items()) dict.insert(key, value_of(item));
      return dict;
    }
    default: refuse<c10::ValueError>("the note has a value that JSON does not have");
  }
}

Json json_of(const c10::IValue& value) {
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isList()) {
    Json list = Json::array();
    for (const c10::IValue& item : value.toListRef()) list.push_back(json_of(item));
    return list;
  }
  if (value.isGenericDict()) {
    Json dict = Json::object();
    for (const auto& entry : value.toGenericDict()) {
      if (!entry.key().isString()) refuse<c10::ValueError>("the note has a key that is no text");
      dict[entry.key().toStringRef()] = json_of(entry.value());
    }
    return dict;
  }
  refuse<c10::ValueError>("the note has a ", value.tagKind(), ", which JSON does not have");
}

// The note that a caller gives, as an object; null for none.
Json note_of(const std::string& text) {
  if (text.empty()) return nullptr;
  Json note = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!note.is_object()) refuse<c10::ValueError>("note must be the text of a JSON object, not '", printable(text), "'");
  if (note.contains(kKey)) refuse<c10::ValueError>("the key '", kKey, "' of a note is for embermap itself");
  return note;
}

std::string token_of(const Store& store) {
  const Json note = Json::parse(store.last_commit().note, nullptr, false);
  return note.is_object() && note.contains(kKey) && note[kKey].is_string() ? note[kKey].get<std::string>() : std::string();
}

std::string new_token() {
  std::random_device random;
  std::string token;
  for (int i = 0; i < 32; ++i) token += "0123456789abcdef"[random() % 16];
  return token;
}

// --- what a file says -------------------------------------------------------------------------------------------------------

struct SavedTable {
  std::uint64_t rows = 0, dim = 0;
  std::string dtype;
  std::uint64_t step = 0;
};

struct SavedStore {
  std::string path;
  std::uint64_t commit = 0;
  std::map<std::string, SavedTable> tables;
};

struct Content {
  std::string token;
  std::map<std::string, torch::Tensor> model;
  std::vector<torch::Tensor> optimizers;  // archives, as bytes
  bool python_optimizers = false;         // has states of optimizers that C++ does not read
  torch::Tensor rng;                      // of the host
  std::vector<torch::Tensor> rng_cuda;    // of each device
  std::vector<SavedStore> stores;
  Json note;
};

SavedStore describe(Store& store, std::uint64_t commit) {
  SavedStore out{store.path().native(), commit, {}};
  for (const std::string& name : store.tables()) {
    const Table table = store.table(name);
    out.tables[name] = {table.rows(), table.dim(), std::string(dtype_name(table.dtype())), table.step()};
  }
  return out;
}

c10::IValue value_of(const SavedStore& store) {
  Dict tables = new_dict();
  for (const auto& [name, table] : store.tables) {
    Dict entry = new_dict();
    entry.insert("rows", static_cast<std::int64_t>(table.rows));
    entry.insert("dim", static_cast<std::int64_t>(table.dim));
    entry.insert("dtype", table.dtype);
    entry.insert("step", static_cast<std::int64_t>(table.step));
    tables.insert(name, entry);
  }
  Dict out = new_dict();
  out.insert("path", store.path);
  out.insert("commit", static_cast<std::int64_t>(store.commit));
  out.insert("tables", tables);
  return out;
}

c10::IValue value_of(const Content& content) {
  Dict model = new_dict();
  for (const auto& [name, tensor] : content.model) model.insert(name, tensor);
  List optimizers = new_list();
  for (const torch::Tensor& archive : content.optimizers) optimizers.push_back(archive);
  List cuda = new_list();
  for (const torch::Tensor& state : content.rng_cuda) cuda.push_back(state);
  Dict rng = new_dict();
  rng.insert("cpu", content.rng);
  rng.insert("cuda", cuda);
  List stores = new_list();
  for (const SavedStore& store : content.stores) stores.push_back(value_of(store));
  Dict out = new_dict();
  out.insert("version", kVersion);
  out.insert("token", content.token);
  out.insert("model", model);
  out.insert("optimizer", c10::IValue());  // states as Python has them
  out.insert("cpp_optimizers", optimizers);
  out.insert("rng", rng);
  out.insert("stores", stores);
  out.insert("note", value_of(content.note));
  return out;
}

// A value of a dictionary; throws c10::ValueError where it is not there.
c10::IValue get(const Dict& dict, const char* key) {
  const auto found = dict.find(key);
  if (found == dict.end()) refuse<c10::ValueError>("it has no '", key, "'");
  return found->value();
}

std::uint64_t count_of(const Dict& dict, const char* key) {
  const std::int64_t value = get(dict, key).toInt();
  if (value < 0) refuse<c10::ValueError>("its '", key, "' is ", value);
  return static_cast<std::uint64_t>(value);
}

Content content_of(const c10::IValue& value) {
  if (!value.isGenericDict() || !value.toGenericDict().contains("token") || !value.toGenericDict().contains("stores"))
    refuse<c10::ValueError>("it is no file of embermap::nn::save or embermap.torch.save");
  const Dict dict = value.toGenericDict();
  if (const std::int64_t version = get(dict, "version").toInt(); version > kVersion)
    refuse<c10::ValueError>("it is of version ", version, "; this embermap reads ", kVersion);
  Content out;
  out.token = get(dict, "token").toStringRef();
  for (const auto& entry : get(dict, "model").toGenericDict())
    out.model[entry.key().toStringRef()] = entry.value().isTensor() ? entry.value().toTensor() : torch::Tensor();
  if (dict.contains("cpp_optimizers"))
    for (const c10::IValue& archive : get(dict, "cpp_optimizers").toListRef()) out.optimizers.push_back(archive.toTensor());
  out.python_optimizers = !get(dict, "optimizer").isNone();
  const Dict rng = get(dict, "rng").toGenericDict();
  out.rng = get(rng, "cpu").toTensor();
  for (const c10::IValue& state : get(rng, "cuda").toListRef()) out.rng_cuda.push_back(state.toTensor());
  for (const c10::IValue& each : get(dict, "stores").toListRef()) {
    const Dict store = each.toGenericDict();
    SavedStore saved{get(store, "path").toStringRef(), count_of(store, "commit"), {}};
    for (const auto& entry : get(store, "tables").toGenericDict()) {
      const Dict table = entry.value().toGenericDict();
      saved.tables[entry.key().toStringRef()] = {count_of(table, "rows"), count_of(table, "dim"),
                                                 get(table, "dtype").toStringRef(), count_of(table, "step")};
    }
    out.stores.push_back(std::move(saved));
  }
  out.note = json_of(get(dict, "note"));
  return out;
}

// --- files ------------------------------------------------------------------------------------------------------------------

Path next_of(const Path& file) { return Path(file.native() + ".next"); }
Path part_of(const Path& file) { return Path(file.native() + ".part"); }

void move_file(const Path& from, const Path& to) {
  if (FileOps::system().rename(from.c_str(), to.c_str()) != 0) throw IoError(errno, "rename", from);
}

// A complete, durable file, or none.
void write(const Content& content, const Path& path) {
  std::string pickle;
  // Without tags of types, which only TorchScript has.
  torch::jit::Pickler pickler([&](const char* bytes, std::size_t count) { pickle.append(bytes, count); }, nullptr, nullptr,
                              nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(value_of(content));
  pickler.stop();

  FileOps::system().unlink(path.c_str());  // of a run that was killed
  File file = File::open(path, File::Mode::kCreateNew);
  try {
    std::uint64_t offset = 0;
    std::exception_ptr failed;  // no exception goes through the archive's writer
    const auto append = [&](const void* bytes, std::size_t count) -> std::size_t {
      try {
        file.write(offset, std::span(static_cast<const std::byte*>(bytes), count));
      } catch (...) {
        failed = std::current_exception();
        return 0;
      }
      offset += count;
      return count;
    };
    try {
      caffe2::serialize::PyTorchStreamWriter archive(append);
      archive.writeRecord("data.pkl", pickle.data(), pickle.size());
      std::size_t key = 0;
      for (const torch::Tensor& tensor : pickler.tensorData())
        archive.writeRecord("data/" + std::to_string(key++), tensor.storage().data(), tensor.storage().nbytes());
      archive.writeEndOfFile();
    } catch (const c10::Error&) {
      if (!failed) throw;
    }
    if (failed) std::rethrow_exception(failed);
    file.sync_all();
  } catch (...) {
    FileOps::system().unlink(path.c_str());
    throw;
  }
}

// The archive is read piece by piece.
class FileAdapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit FileAdapter(const Path& path) : file_{File::open(path, File::Mode::kRead)} {}
  std::size_t size() const override { return file_.size(); }
  std::size_t read(std::uint64_t position, void* buffer, std::size_t count, const char* /*what*/) const override {
    return file_.read_some(position, std::span(static_cast<std::byte*>(buffer), count));
  }

 private:
  File file_;
};

Content read(const Path& path) {
  const auto adapter = std::make_shared<FileAdapter>(path);
  try {
    caffe2::serialize::PyTorchStreamReader reader(adapter);
    return content_of(
        torch::jit::readArchiveAndTensors("data", "", "", std::nullopt, std::nullopt, torch::Device(torch::kCPU), reader));
  } catch (const c10::Error& e) {
    const std::string text = e.what_without_backtrace();
    throw FormatError(path, "cannot be read as a checkpoint: " + printable(text.substr(0, text.find('\n'))));
  }
}

// --- state ------------------------------------------------------------------------------------------------------------------

// By name: parameters and buffers, as Python's state_dict() has them.
std::map<std::string, torch::Tensor> state_of(const torch::nn::Module& model) {
  std::map<std::string, torch::Tensor> out;
  for (const auto& entry : model.named_parameters()) out[entry.key()] = entry.value();
  for (const auto& entry : model.named_buffers()) out[entry.key()] = entry.value();
  return out;
}

// On the host, and not in memory that others have a part of.
torch::Tensor host_copy(const std::string& name, const torch::Tensor& tensor) {
  if (!tensor.defined()) refuse<c10::ValueError>("'", printable(name), "' is an undefined tensor");
  if (tensor.layout() != torch::kStrided || tensor.is_quantized())
    refuse<c10::NotImplementedError>("'", printable(name), "' is no dense tensor, but ", tensor.toString());
  torch::Tensor host = tensor.detach().cpu().contiguous();
  return host.storage().nbytes() == host.nbytes() ? host : host.clone();
}

torch::Tensor bytes_of(const torch::optim::Optimizer& optimizer) {
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(stream);
  const std::string text = std::move(stream).str();
  torch::Tensor out = torch::empty({static_cast<std::int64_t>(text.size())}, torch::kUInt8);
  if (!text.empty()) std::memcpy(out.data_ptr(), text.data(), text.size());
  return out;
}

void load_optimizer(torch::optim::Optimizer& optimizer, const torch::Tensor& bytes) {
  const torch::Tensor host = bytes.cpu().contiguous();
  std::istringstream stream(std::string(static_cast<const char*>(host.const_data_ptr()), static_cast<std::size_t>(host.numel())));
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  optimizer.load(archive);
}

torch::Tensor state_of(const at::Generator& generator) {
  const std::lock_guard lock(const_cast<at::Generator&>(generator).mutex());
  return generator.get_state();
}

void set_state(const at::Generator& generator, const torch::Tensor& state) {
  at::Generator same = generator;
  const std::lock_guard lock(same.mutex());
  same.set_state(state);
}

std::size_t torch_cuda_devices() { return static_cast<std::size_t>(std::max<int>(0, torch::cuda::device_count())); }

const at::Generator& cuda_generator(std::size_t device) {
  return at::globalContext().defaultGenerator(torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

// --- stores -----------------------------------------------------------------------------------------------------------------

void check_stores(const torch::nn::Module& model, std::vector<Store>& stores) {
  if (stores.empty()) refuse<c10::ValueError>("no store given: a checkpoint is of one commit at least");
  for (const torch::Tensor& anchor : table_parameters(model)) {
    const Table table = pending_of(anchor)->table();
    const auto has = [&](Store& store) {
      return store.contains(table.name()) && store.table(table.name()).impl() == table.impl();
    };
    if (std::none_of(stores.begin(), stores.end(), has))
      refuse<c10::ValueError>("table '", printable(table.name()), "' of the model is in none of the stores given");
  }
}

// Whether the file is of the commits that the stores are at.
bool fits(const Content& content, const std::vector<Store>& stores) {
  return content.stores.size() == stores.size() &&
         std::all_of(stores.begin(), stores.end(), [&](const Store& store) { return token_of(store) == content.token; });
}

void check(const Content& content, std::vector<Store>& stores, const Path& file) {
  if (content.stores.size() != stores.size())
    refuse<c10::ValueError>(quoted(file), " is of ", content.stores.size(), " stores, given are ", stores.size());
  for (std::size_t i = 0; i < stores.size(); ++i) {
    Store& store = stores[i];
    const SavedStore& of = content.stores[i];
    if (token_of(store) != content.token) {
      std::optional<std::uint64_t> number;
      for (const CommitInfo& commit : store.commits()) {
        const Json note = Json::parse(commit.note, nullptr, false);
        if (note.is_object() && note.value(kKey, Json()) == content.token) number = commit.number;
      }
      if (number)
        refuse<c10::ValueError>(text_of(store), " is at commit ", store.commit_number(), ", ", quoted(file),
                                " belongs to its commit ", *number,
                                ": the store has gone on since, and cannot go back; take a later file, a reader that is ",
                                "still at that commit, or a snapshot of it");
      refuse<c10::ValueError>(text_of(store), " is at commit ", store.commit_number(), ", ", quoted(file), " belongs to commit ",
                              of.commit, " of '", printable(of.path), "', which is none of its commits: the file is of another ",
                              "store, or of rows that were never committed");
    }
    bool dirty = false;
    for (const auto& [name, saved] : of.tables) {
      if (!store.contains(name)) refuse<c10::ValueError>(text_of(store), " has no table '", printable(name), "' any more");
      if (const auto step = store.table(name).step(); step != saved.step)
        refuse<c10::ValueError>(text_of(store), " has changes since commit ", store.commit_number(), ": table '", printable(name),
                                "' is at step ", step, ", not ", saved.step, "; abandon() it and open it again");
      dirty = dirty || (store.writable() && store.table(name).stats().dirty_pages != 0);
    }
    if (dirty)
      refuse<c10::ValueError>(text_of(store), " has changes since commit ", store.commit_number(), ", which ", quoted(file),
                              " belongs to; abandon() it and open it again");
  }
}

// Throws, in torch's words, unless the file has what the model has.
void check_model(const std::map<std::string, torch::Tensor>& model, const std::map<std::string, torch::Tensor>& saved,
                 bool strict) {
  std::string missing;
  std::string unexpected;
  std::string sizes;
  for (const auto& [name, tensor] : model) {
    const auto found = saved.find(name);
    if (found == saved.end())
      missing += c10::str(missing.empty() ? "" : ", ", '"', printable(name), '"');
    else if (!found->second.defined())
      sizes += c10::str("\n\t", printable(name), " is no tensor in the file.");
    else if (found->second.sizes() != tensor.sizes())
      sizes += c10::str("\n\tsize mismatch for ", printable(name), ": copying a param with shape ", found->second.sizes(),
                        " from checkpoint, the shape in current model is ", tensor.sizes(), ".");
  }
  for (const auto& entry : saved)
    if (!model.contains(entry.first)) unexpected += c10::str(unexpected.empty() ? "" : ", ", '"', printable(entry.first), '"');
  std::string text;
  if (strict && !missing.empty()) text += "\n\tMissing key(s) in state_dict: " + missing + ".";
  if (strict && !unexpected.empty()) text += "\n\tUnexpected key(s) in state_dict: " + unexpected + ".";
  text += sizes;
  if (!text.empty()) refuse<c10::ValueError>("Error(s) in loading state_dict:", text);
}

Checkpoint summary(const Content& content) {
  Checkpoint out;
  for (const SavedStore& store : content.stores) out.commits.push_back(store.commit);
  if (!content.note.is_null()) out.note = content.note.dump();
  return out;
}

}  // namespace

Checkpoint save(const torch::nn::Module& model, const Path& path, std::vector<Store> stores, const SaveOptions& options) {
  check_stores(model, stores);
  for (const Store& store : stores)
    if (!store.writable()) throw ReadOnlyError(text_of(store) + " is open read-only");
  Content content;
  content.token = new_token();
  content.note = note_of(options.note);
  for (const auto& [name, tensor] : state_of(model)) content.model[name] = host_copy(name, tensor);
  for (const auto* optimizer : options.optimizers) {
    if (optimizer == nullptr) refuse<c10::ValueError>("an optimizer to save is null");
    content.optimizers.push_back(bytes_of(*optimizer));
  }
  content.rng = state_of(at::detail::getDefaultCPUGenerator());
  if (std::any_of(stores.begin(), stores.end(), [](const Store& store) { return store.device() >= 0; }))
    for (std::size_t device = 0; device < torch_cuda_devices(); ++device)
      content.rng_cuda.push_back(state_of(cuda_generator(device)));
  for (Store& store : stores) content.stores.push_back(describe(store, store.commit_number() + 1));

  const Path file = std::filesystem::absolute(path);
  const bool unfinished = std::filesystem::exists(next_of(file)) && fits(read(next_of(file)), stores);
  write(content, part_of(file));
  if (unfinished) move_file(next_of(file), file);  // of a run that ended between its commit and this
  move_file(part_of(file), next_of(file));
  sync_directory(file.parent_path());
  Json note = content.note.is_null() ? Json::object() : content.note;
  note[kKey] = content.token;
  bool as_told = true;
  for (std::size_t i = 0; i < stores.size(); ++i) {
    const std::uint64_t number = as_torch([&] { return stores[i].commit(note.dump()); });
    if (number != content.stores[i].commit) {  // another thread committed
      content.stores[i] = describe(stores[i], number);
      as_told = false;
    }
  }
  if (!as_told) {
    write(content, part_of(file));
    move_file(part_of(file), next_of(file));
  }
  move_file(next_of(file), file);
  sync_directory(file.parent_path());
  return summary(content);
}

Checkpoint load(torch::nn::Module& model, const Path& path, std::vector<Store> stores, const LoadOptions& options) {
  check_stores(model, stores);
  const Path file = std::filesystem::absolute(path);
  std::optional<Content> content;
  for (const Path& each : {next_of(file), file}) {
    if (!std::filesystem::exists(each)) continue;
    Content candidate = read(each);
    const bool found = fits(candidate, stores);
    content = std::move(candidate);
    if (found) break;
  }
  if (!content) throw NotFound("no checkpoint " + quoted(file));
  check(*content, stores, file);
  const auto state = state_of(model);
  check_model(state, content->model, options.strict);
  if (!options.optimizers.empty()) {
    if (content->optimizers.empty() && content->python_optimizers)
      refuse<c10::ValueError>(quoted(file), " was written by Python: its states of optimizers are for embermap.torch.load");
    if (content->optimizers.size() != options.optimizers.size())
      refuse<c10::ValueError>(quoted(file), " has ", content->optimizers.size(), " states of optimizers, given are ",
                              options.optimizers.size());
    for (const auto* optimizer : options.optimizers)
      if (optimizer == nullptr) refuse<c10::ValueError>("an optimizer to load is null");
  }
  if (options.rng && content->rng_cuda.size() > torch_cuda_devices())
    refuse<c10::ValueError>(quoted(file), " has random numbers of ", content->rng_cuda.size(), " CUDA devices, here are ",
                            torch_cuda_devices());

  // Optimizers first: only they can still refuse.
  for (std::size_t i = 0; i < options.optimizers.size(); ++i) load_optimizer(*options.optimizers[i], content->optimizers[i]);
  {
    const torch::NoGradGuard no_grad;
    for (const auto& [name, tensor] : state)
      if (const auto found = content->model.find(name); found != content->model.end()) {
        torch::Tensor same = tensor;
        same.copy_(found->second);
      }
  }
  if (options.rng) {
    set_state(at::detail::getDefaultCPUGenerator(), content->rng.cpu());
    for (std::size_t device = 0; device < content->rng_cuda.size(); ++device)
      set_state(cuda_generator(device), content->rng_cuda[device].cpu());
  }
  return summary(*content);
}

}  // namespace embermap::nn
