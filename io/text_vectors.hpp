// Vectors as text, a row a line: the word, then its numbers. What readers and writers of word2vec text and GloVe share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.hpp"

namespace embermap {

// "rows dim" of the first line of word2vec's formats, blanks around them ignored; nothing if it is anything else.
struct Word2vecHeader {
  std::uint64_t rows = 0, dim = 0;
};
std::optional<Word2vecHeader> parse_word2vec_header(std::string_view line);

// How many numbers a line may have at most: fields behind its first one, which is (the beginning of) a word.
std::uint64_t count_numbers(std::string_view line);

// Parses a line without its end into `dim` numbers of float32, float64 or int64. The word is what stands before them and one
// blank, and may hold, begin and end with blanks, unless numbers alone follow its first part: those are numbers too many. Where
// numbers are more than one blank apart, columns are aligned, and no blanks end the word. Blanks are spaces and tabs; those at
// the end of the line are ignored. Returns what is wrong, empty if nothing is.
template <class T>
std::string parse_text_row(std::string_view line, std::uint64_t dim, T* out, std::string_view& word);

// Appends "word 0.1 -2 nan\n", with `blank` between its parts: the shortest numbers that are read as the same bits again (NaN: as
// some NaN).
void format_text_row(std::string_view word, DType dtype, const std::byte* row, std::uint64_t dim, std::string& out,
                     char blank = ' ');

// Why a line with this word would not be read as this word again; empty if it would. With `spaces`, blanks inside are possible.
std::string text_word_obstacle(std::string_view word, bool spaces);

}  // namespace embermap
