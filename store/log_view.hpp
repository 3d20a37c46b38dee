// The redo log as a reader in another process sees it: the pages of the commits that were whole when it looked.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <vector>

#include "base/shared_mutex.hpp"
#include "base/thread_pool.hpp"
#include "io/page_io.hpp"
#include "store/log_format.hpp"
#include "store/log_index.hpp"
#include "store/logged_pages.hpp"

namespace embermap {

// A reader stays at one commit. As long as the writer applies nothing later, the tables' files and the log together have it; the
// log's header says when that ends, and whoever reads looks at it once more afterwards. No lock is taken that the writer would
// wait for.
//
// Thread safety: all members may be called from several threads.
class LogView final : public LoggedPages {
 public:
  // nullptr if the store has no log. `io`, `ops` must outlive it. Throws FormatError, IoError.
  static std::unique_ptr<LogView> open(const std::filesystem::path& file, ThreadPool& io, const PageIoOptions& options,
                                       FileOps& ops);

  std::uint64_t commit() const noexcept { return commit_; }
  // Throws FormatError if it is another store's log.
  void check_store(const StoreId& store) const { check_log_store(file_.path(), store_, store); }
  // Throws FormatError if a manifest of that commit, which was read after this was opened, cannot be of the same store at the
  // same moment. A writer at work may be ahead of what this saw of the log.
  void check_moment(std::uint64_t manifest) const;
  // The text of the commit's manifest; empty if the log has no commit that is not in the files.
  const std::string& manifest() const noexcept { return manifest_; }
  std::uint64_t bytes() const noexcept { return bytes_; }    // of the commits in the log
  std::uint64_t applied() const noexcept { return first_; }  // the commit up to which the tables' files had all, then
  // What of its commits the log lacks, as what_log_lacks(); empty: nothing.
  const std::string& lack() const noexcept { return lack_; }
  // True if the writer has neither begun nor ended to apply anything since the log was opened, and has not made the log anew.
  bool unchanged() const;

  // LoggedPages. reading() throws StaleError if the writer has applied a later commit.
  bool empty() const noexcept override { return index_.size() == 0; }
  void reading(const std::function<void()>& body) override;
  std::optional<LoggedVersion> find(std::uint32_t table, std::uint64_t page) const override;
  void find(std::uint32_t table, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const override;
  std::uint64_t read(std::span<const IoPiece> pieces, const PageIo::Done& done) override { return io_.read(pieces, done); }
  PageIo* io() noexcept override { return &io_; }
  void for_each(std::uint32_t table, const std::function<void(std::uint64_t, const LoggedVersion&)>& body) const override;
  std::vector<std::uint64_t> files_known() const override { return files_known_; }

 private:
  LogView(File file, ThreadPool& io, const PageIoOptions& options);
  void load();
  LogHeader header_now() const;  // throws StaleError if there is no log any more
  // The pages that were in the log are in the tables' files now. Throws StaleError if later ones may be there, too.
  void follow(const LogHeader& now);
  LoggedVersion place(const LoggedVersion& version) const;  // where a version is now

  const File file_;
  PageIo io_;
  LogIndex index_;  // as it was when the log was opened
  std::uint64_t commit_ = 0;
  std::uint64_t first_ = 0;  // the commit that was applied when the log was opened
  StoreId store_;
  std::string manifest_;
  std::uint64_t bytes_ = 0;
  std::string lack_;
  std::uint64_t end_ = 0;                   // of the records that are whole
  std::vector<std::uint64_t> files_known_;  // which header, unless something was being applied
  mutable std::mutex mutex_;
  LogHeader header_;          // of what follows
  std::uint64_t applied_to_;  // what lies before this position in the log is in the files
};

// What a reader has instead where the store has no log: a writer may change the files at any time, and leaves traces of it before
// it does. reading() throws StaleError once there are any.
//
// Thread safety: all members may be called from several threads.
class UnloggedView final : public LoggedPages {
 public:
  explicit UnloggedView(std::filesystem::path store);
  bool unchanged() const noexcept;

  bool empty() const noexcept override { return true; }
  void reading(const std::function<void()>& body) override;
  std::optional<LoggedVersion> find(std::uint32_t, std::uint64_t) const override { return std::nullopt; }
  void find(std::uint32_t, std::span<const std::uint64_t> pages, std::span<LoggedVersion> out) const override;
  std::uint64_t read(std::span<const IoPiece>, const PageIo::Done&) override { return 0; }
  PageIo* io() noexcept override { return nullptr; }
  void for_each(std::uint32_t, const std::function<void(std::uint64_t, const LoggedVersion&)>&) const override {}
  std::vector<std::uint64_t> files_known() const override;

 private:
  // Which file has a name, and when it was changed: zeros where there is none.
  struct Trace {
    std::uint64_t inode = 0, bytes = 0;
    std::int64_t seconds = 0, nanoseconds = 0;
    bool operator==(const Trace&) const = default;
  };
  static Trace trace_of(const std::filesystem::path& file) noexcept;
  std::array<Trace, 3> traces() const noexcept;

  const std::filesystem::path log_, mark_, manifest_;
  const std::array<Trace, 3> before_;
};

}  // namespace embermap
