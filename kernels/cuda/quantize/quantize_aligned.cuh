// Quantizes MX operands that are multiplied but not saved directly to aligned codes (../aligned.cuh), along the rows, the
// columns or both, from one read. The bits are those of the quantizers followed by align.cu, rounded to nearest.
//
// Like 1x128 blocks, each line of a tile has one group of four blocks, whose amaxes are combined in shared memory. A thread
// there has a line: it determines four scales, and from the code of each amax the exponent that they share. Then codes are
// computed as in quantize_tiles.cuh and shifted in registers. With `Stored`, the columns' codes stay in the format, for a
// backward that saves them.
#pragma once

#include "../aligned.cuh"
#include "quantize_groups.cuh"

namespace blockfp {
namespace cuda {

__device__ __forceinline__ int64_t filled(int64_t length, int64_t unit) { return (length + unit - 1) / unit * unit; }

// A power of two, or NaN, by which codes are shifted, in 16 bits: fp16 for E4M3; for E5M2 the upper bytes of two factors, 0 if
// every code becomes zero. Blocks that were just quantized are never shifted up by more than 2^15.
constexpr uint32_t kShiftToNan = 0x7E00;

template <class Target>
__device__ __forceinline__ uint32_t shift_of(int exponent) {
  if constexpr (Target::kId == E4M3::kId) return half_of_power(min(max(exponent, -24), 15));
  const auto byte = [](int e) { return e < -16 ? 0 : half_of_power(e) >> 8; };
  const int first = min(max(exponent, -16), 15);
  return byte(first) | byte(exponent - first) << 8;
}

// Aligns eight packed codes of E. `shift` is in the lower half of its word.
template <class E>
__device__ __forceinline__ uint2 aligned_eight(uint2 packed, uint32_t shift) {
  using Target = AlignedElement<E>;
  const uint2 bytes = bytes_of_eight<E>(packed);
  if constexpr (Target::kId == E4M3::kId) {
    const uint32_t factors[1] = {__byte_perm(shift, 0, 0x1010)};
    return {shifted<Target>(widened<E>(bytes.x), factors), shifted<Target>(widened<E>(bytes.y), factors)};
  } else {
    const uint32_t factors[2] = {__byte_perm(shift, 0, 0x0404), __byte_perm(shift, 0, 0x1414)};
    return {shifted<Target>(bytes.x, factors), shifted<Target>(bytes.y, factors)};
  }
}

// The magnitude code of y >= 0, as `widened` represents it.
template <class E>
__device__ __forceinline__ int widened_magnitude(float y) {
  if constexpr (E::kId == E2M1::kId) {
    return (__float_as_int(e2m1_magnitude(y)) & 7) << 2;
  } else {
    constexpr bool kWide = E::kMantissaBits == 2;
    const int code = min(static_cast<int>(convert_pair<kWide>(multiply(y, prescaled<E>(1.0f)), 0.0f) & 0x7F), int{E::kMaxCode});
    return E::kBits == 6 ? code << (3 - E::kMantissaBits) : code;
  }
}

// Words for eight lines of a thread's piece: the upper half of a multiplier, and a shift. They replace LineScales.
struct AlignedWords {
  static constexpr int kPerWord = 2;
  static constexpr Range kBounds = Range::kAny;
  bool care;  // some block of the tile contains a NaN or an Inf
  uint32_t word[8];

  __device__ __forceinline__ AlignedWords(const uint32_t* from, bool any) : care(any) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(from + i);
      word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
    }
  }

  __device__ __forceinline__ void gather(uint32_t (&words)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __byte_perm(word[2 * i], word[2 * i + 1], 0x7632);
  }

  __device__ __forceinline__ static float multiplier(const uint32_t (&words)[4], int line) {
    return __uint_as_float(line % 2 ? words[line / 2] & 0xFFFF0000u : words[line / 2] << 16);
  }

  // Aligned codes of a line; `inside`: how many of the eight elements exist.
  template <class E>
  __device__ __forceinline__ uint2 aligned(int line, uint2 codes, int inside) const {
    uint2 out = aligned_eight<E>(codes, word[line]);
    // A NaN block ends where x does.
    if (!E::kHasNan && care) out = {first_bytes(out.x, inside), first_bytes(out.y, inside - 4)};
    return out;
  }
};

// Scales of a tile's lines: amaxes of their four blocks, then in the same memory the words of AlignedWords.
template <class E, class T, Rounding R, bool Columns>
struct AlignedLines {
  using P = Piece<E, T, R>;
  using Target = AlignedElement<E>;
  static constexpr int kBlocks = 4;
  static_assert(kTileRows == 128 && kTileColumns == 128 && kBlocks * 32 == 128, "a line's group is as long as a tile");

  __align__(16) uint32_t rows[kBlocks][kTileRows];
  std::conditional_t<Columns, uint32_t[kBlocks][kTileColumns], Nothing> columns;

  // Stores the scales; on return, words are ready for all threads. True if some block contains a NaN or an Inf.
  __device__ __forceinline__ bool decide(const P& piece) {
    const QuantizeArguments& a = piece.a;
    const bool nan = __syncthreads_or(share_all<false>(piece));
    if (nan) {
      share_all<true>(piece);
      __syncthreads();
    }
    // Half of the threads have a row each, the other half a column.
    const int line = threadIdx.x % 128;
    if (threadIdx.x < 128) {
      if (a.aligned_row.codes != nullptr) store(a.aligned_row.scales, place_of_row(piece, line), decide_line(a, rows, line));
    } else if constexpr (Columns) {
      if (a.aligned_column.codes != nullptr) store(a.aligned_column.scales, place_of_column(piece, line), decide_line(a, columns, line));
    }
    __syncthreads();
    return nan;
  }

  __device__ __forceinline__ AlignedWords of_rows(const P& piece, bool nan) const {
    return {rows[piece.place.column / 32] + piece.place.row, nan};
  }
  __device__ __forceinline__ AlignedWords of_columns(const P& piece, bool nan) const {
    return {columns[piece.place.row / 32] + piece.place.column, nan};
  }

 private:
  template <bool Marks>
  __device__ __forceinline__ bool share_all(const P& piece) {
    const QuantizeArguments& a = piece.a;
    bool special = false;
    if (a.aligned_row.codes != nullptr) {
      special = share<Marks, P::kRows / kLinesPerWord<T>, 1>(
          [&](auto poison, auto& words) { piece.template row_amaxes<decltype(poison)::value>(words); },
          rows[piece.place.column / 32] + piece.place.row);
    }
    if constexpr (Columns) {
      if (a.aligned_column.codes != nullptr) {
        special |= share<Marks, kWords<T>, 8>(
            [&](auto poison, auto& words) { piece.template column_amaxes<decltype(poison)::value>(words); },
            columns[piece.place.row / 32] + piece.place.column);
      }
    }
    return special;
  }

  // Amaxes of a piece's lines, each of a block held by four lanes; with `Marks`, the highest bit indicates a NaN.
  template <bool Marks, int Words, int Step, class Amaxes>
  __device__ __forceinline__ static bool share(Amaxes amaxes, uint32_t* out) {
    using Share = LaneShare<Words, 4, Step>;
    static_assert(Share::kSame == 1, "each lane has lines of its own");
    uint32_t poisoned[Words], most[Words];
    amaxes(std::true_type{}, poisoned);
    Share::template reduce<T, true>(poisoned);
    if constexpr (Marks) {
      amaxes(std::false_type{}, most);
      Share::template reduce<T, false>(most);
    }
    bool special = false;
#pragma unroll
    for (int i = 0; i < Share::kMine * kLinesPerWord<T>; ++i) {
      constexpr int kLines = kLinesPerWord<T>;
      uint32_t amax = magnitude_bits<T, true>(poisoned[i / kLines], i % kLines);
      const bool nan = amax > static_cast<uint32_t>(kInfinity);
      special |= amax >= static_cast<uint32_t>(kInfinity);
      if constexpr (Marks) amax = magnitude_bits<T, false>(most[i / kLines], i % kLines) | (nan ? 0x80000000u : 0);
      out[Share::first() * kLines + i] = amax;
    }
    return special;
  }

  // The scale that a line's blocks share.
  __device__ __forceinline__ static float decide_line(const QuantizeArguments& a, uint32_t (&words)[kBlocks][128], int line) {
    int scales[kBlocks], highest = kNone;
    uint32_t multipliers[kBlocks];
    bool marked[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t word = words[b][line];
      const int32_t amax = word & kMagnitude;
      const bool nan = word >> 31;
      const BlockScale<float> scale = block_scale<E, 32>(amax, a, {});
      note_overflow<R>(a, amax);
      // NaN counts as the largest number if it has a code; otherwise the block has no exponent.
      marked[b] = !E::kHasNan && nan;
      const int magnitude = nan ? int{Target::kMaxCode} : widened_magnitude<E>(multiply(from_bits<float>(amax), scale.multiplier));
      if (!marked[b]) highest = max(highest, exponent_of<Target>(magnitude) + kLift<E> + scale.stored);
      scales[b] = scale.stored, multipliers[b] = to_bits(scale.multiplier);
    }
    const int shared = shared_exponent<Target>(highest);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint32_t shift = marked[b] ? kShiftToNan : shift_of<Target>(scales[b] - shared + kLift<E>);
      words[b][line] = (multipliers[b] & 0xFFFF0000u) | shift;
    }
    return shared_scale(shared);
  }

  __device__ __forceinline__ static void store(float* scales, int64_t place, float scale) {
    if (place >= 0) scales[place] = scale;
  }

  // Position of a line's scale: block by block, with lines padded to a multiple of 4. Negative if there is none.
  __device__ __forceinline__ static int64_t place_of_row(const P& piece, int line) {
    const QuantizeArguments& a = piece.a;
    const int64_t row = piece.tile.row + line, block = piece.tile.column / 128;
    if constexpr (kOfGroups<R>) {
      return row < a.x.rows ? block * filled(a.groups.tokens, 4) + a.groups.own.first_row + row : -1;
    }
    const int64_t lines = filled(a.x.rows, 4);
    return row < lines ? (piece.tile.batch * (filled(a.x.columns, 128) / 128) + block) * lines + row : -1;
  }
  __device__ __forceinline__ static int64_t place_of_column(const P& piece, int line) {
    const QuantizeArguments& a = piece.a;
    const int64_t column = piece.tile.column + line, lines = filled(a.x.columns, 4);
    if (column >= lines) return -1;
    if constexpr (kOfGroups<R>) return (a.groups.own.first_column + piece.tile.row) / 128 * lines + column;
    return (piece.tile.batch * (filled(a.x.rows, 128) / 128) + piece.tile.row / 128) * lines + column;
  }
};

// Number of elements, at most eight, of `all` that remain from `at`.
__device__ __forceinline__ int inside_of(int64_t all, int64_t at) { return static_cast<int>(max(min(all - at, int64_t{8}), int64_t{0})); }

// A tile's codes and scales in shared memory.
template <class E, class T, Rounding R, bool Stored>
struct StagedAligned {
  AlignedLines<E, T, R, !Stored> lines;
  std::conditional_t<Stored, StagedLines<E, 32, R>, Staging<AlignedElement<E>>> codes;
};

// Aligned codes of a piece's rows, which begin at vector boundaries.
template <class E, class T, Rounding R>
__device__ __forceinline__ void align_rows(const Piece<E, T, R>& piece, const AlignedWords& words) {
  const QuantizeArguments& a = piece.a;
  const int64_t row = piece.tile.row + piece.place.row, column = piece.tile.column + piece.place.column;
  const int64_t pitch = filled(a.x.columns, kAlignedUnit);
  const int64_t line = kOfGroups<R> ? a.groups.own.first_row + row : piece.tile.batch * a.x.rows + row;
  uint8_t* out = a.aligned_row.codes + line * pitch + column;
  const int lines = column < pitch ? inside_of(a.x.rows, row) : 0, inside = inside_of(a.x.columns, column);
  encode_rows(piece, words, {}, [&](int r, uint2 codes) {
    const uint2 aligned = words.template aligned<E>(r, codes, inside);
    if (r < lines) *reinterpret_cast<uint2*>(out) = aligned;
    out += pitch;
  });
}

// Puts the aligned codes of a piece's columns into `staging`.
template <class E, class T, Rounding R>
__device__ __forceinline__ void align_columns(const Piece<E, T, R>& piece, const AlignedWords& words, Staging<AlignedElement<E>>& staging) {
  // A group is padded with zeros, which are part of its blocks.
  const int inside = kOfGroups<R> ? 8 : inside_of(piece.a.x.rows, piece.tile.row + piece.place.row);
  encode_columns(piece, words, {}, [&](int j, uint2 codes) {
    staging.put(piece.place.column + j, piece.place.row / kDepth, words.template aligned<E>(j, codes, inside));
  });
}

template <class E, class T, Rounding R>
__device__ __forceinline__ void copy_columns(const Piece<E, T, R>& piece, const Staging<AlignedElement<E>>& staging) {
  const QuantizeArguments& a = piece.a;
  const TileOrigin& tile = piece.tile;
  const int64_t pitch = kOfGroups<R> ? a.groups.columns : filled(a.x.rows, kAlignedUnit);
  const int64_t first = kOfGroups<R> ? a.groups.own.first_column + tile.row : tile.row;
  const int64_t line = (kOfGroups<R> ? 0 : tile.batch * a.x.columns) + tile.column;
  staging.copy_vectors(a.aligned_column.codes + line * pitch + first, pitch, kOfGroups<R> ? kTileRows : pitch - tile.row,
                       a.x.columns - tile.column);
}

template <bool Stored, class E, class T, Rounding R>
__device__ __forceinline__ void quantize_aligned_piece(Piece<E, T, R>& piece, StagedAligned<E, T, R, Stored>& shared) {
  const QuantizeArguments& a = piece.a;
  const bool nan = shared.lines.decide(piece);
  if (a.aligned_row.codes != nullptr) align_rows(piece, shared.lines.of_rows(piece, nan));
  if constexpr (Stored) {
    // Only the aligned rows are needed.
    quantize_lines<32>(piece, {}, shared.codes);
  } else if (a.aligned_column.codes != nullptr) {
    align_columns(piece, shared.lines.of_columns(piece, nan), shared.codes);
    __syncthreads();
    copy_columns(piece, shared.codes);
  }
}

// Thread blocks that a multiprocessor's registers allow.
template <class T>
constexpr int kAlignedBlocks = sizeof(typename T::Raw) == 4 ? 2 : 3;

template <class E, class T, Rounding R, bool Stored, class Source>
__global__ void __launch_bounds__(kTileThreads, kAlignedBlocks<T>)
    quantize_aligned(const __grid_constant__ QuantizeArguments a, uint32_t across, uint32_t down, uint32_t strip, bool vectors) {
  if (Stored && a.scales_by_tile) launch_dependents();
  __shared__ __align__(16) StagedAligned<E, T, R, Stored> shared;
  Piece<E, T, R> piece(a, tile_of_block(a.window, across, down, strip));
  Source::load(piece, vectors);
  quantize_aligned_piece<Stored>(piece, shared);
}

// The same for rows in groups.
template <class E, class T, Rounding R, bool Stored>
__global__ void __launch_bounds__(kTileThreads, kAlignedBlocks<T>)
    quantize_groups_aligned(const __grid_constant__ QuantizeArguments all, uint32_t across, bool vectors) {
  __shared__ __align__(16) StagedAligned<E, T, R, Stored> shared;
  QuantizeArguments a = all;
  TileOrigin tile;
  if (!find_group(a, tile, across) || a.x.rows == 0) return;
  Piece<E, T, R> piece(a, tile);
  piece.load(vectors);
  quantize_aligned_piece<Stored>(piece, shared);
}

}  // namespace cuda
}  // namespace blockfp
