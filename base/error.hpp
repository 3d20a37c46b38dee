// The exceptions of embermap. Every error a caller can meet derives from Error, and its text names the thing, the place and
// the value: "pread items.npy [4096, +4096): Input/output error". Thrown by value, caught by reference; all are copyable and
// carry no resources. The Python package maps each to one built-in class (given beside it).
#pragma once

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

namespace embermap {

class Error : public std::runtime_error {  // RuntimeError
 public:
  using std::runtime_error::runtime_error;
};

// An argument that cannot be: a dim of 0, a negative lr, a table name with a slash.  ValueError
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A dtype that does not fit here.  TypeError
class DTypeError : public Error {
 public:
  using Error::Error;
};

// A row id outside [0, rows). Nothing has been read or written.  IndexError
class RowIdError : public Error {
 public:
  // `position` is the place of the first bad id in the batch.
  RowIdError(std::string_view table, std::int64_t id, std::uint64_t position, std::uint64_t rows);
  std::int64_t id() const noexcept { return id_; }
  std::uint64_t position() const noexcept { return position_; }

 private:
  std::int64_t id_;
  std::uint64_t position_;
};

// A table, dataset or field that is not there.  KeyError
class NotFound : public Error {
 public:
  using Error::Error;
};

// Something is already there that must not be overwritten.  FileExistsError
class AlreadyExists : public Error {
 public:
  using Error::Error;
};

// A file whose content is not what its format demands: bad magic, truncated, a newer version.  ValueError
class FormatError : public Error {
 public:
  FormatError(const std::filesystem::path& file, std::string_view what);
};

// Bytes that do not match their checksum, or an end of a session that left a table in doubt.  embermap.CorruptError (OSError)
class CorruptError : public Error {
 public:
  using Error::Error;
};

// The store is open for writing elsewhere.  embermap.LockedError (OSError)
class LockedError : public Error {
 public:
  using Error::Error;
};

// A write to a store, table or file that was opened read-only.  PermissionError
class ReadOnlyError : public Error {
 public:
  using Error::Error;
};

// A reader asked for rows of a commit that the writer has replaced in the tables' files since.  embermap.StaleError (OSError)
class StaleError : public Error {
 public:
  using Error::Error;
};

// More was changed since the last commit than the redo log may hold, and the store was told not to commit by itself. Nothing of
// the call that threw has been done.  embermap.LogFullError (OSError)
class LogFullError : public Error {
 public:
  using Error::Error;
};

// memory= is too small for the tables. The text names the least that would do.  MemoryError
class BudgetError : public Error {
 public:
  using Error::Error;
};

// Use of a closed store or of one of its tables.  ValueError
class ClosedError : public Error {
 public:
  using Error::Error;
};

// A failed system call.  OSError with errno and filename
class IoError : public Error {
 public:
  // A call on a whole file: "open items.npy: Permission denied".
  IoError(int error_number, std::string_view call, const std::filesystem::path& file);
  // A call on the bytes [offset, offset + bytes): "pread items.npy [4096, +4096): Input/output error".
  IoError(int error_number, std::string_view call, const std::filesystem::path& file, std::uint64_t offset, std::uint64_t bytes);

  int error_number() const noexcept { return error_number_; }
  const std::filesystem::path& file() const noexcept { return file_; }

 private:
  int error_number_;
  std::filesystem::path file_;
};

// A CUDA call that failed, or a device asked for where there is none.  RuntimeError
class CudaError : public Error {
 public:
  using Error::Error;
};

// `text` with control characters and bytes that are not UTF-8 written as \xNN, so that a message can always be printed.
std::string printable(std::string_view text);
inline std::string printable(const std::string& text) { return printable(std::string_view{text}); }
inline std::string printable(const char* text) { return printable(std::string_view{text}); }
inline std::string printable(const std::filesystem::path& path) { return printable(std::string_view{path.native()}); }
// Its first `most` bytes, cut between two characters, and "..." if that is not all: for what a file says.
std::string printable(std::string_view text, std::size_t most);

}  // namespace embermap
