// Products with the bits of a matrix unit (blockfp/definition/matrix_units.py): 32 columns of one row at a time.
//
// A product of digits times a power of two is an fp32 number whose conversion to an integer truncates it, which is what the unit
// does to each term. Sums of up to 16 terms fit in 32 bits, and everything after them is exact in float64.
#pragma once

#include <cmath>
#include <cstring>

#include "jobs.h"

namespace blockfp {
namespace BLOCKFP_ISA {
namespace product_detail {

#if defined(__AVX512BW__)
constexpr int kBytes = 64;
#elif defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef int16_t Shorts __attribute__((vector_size(kBytes)));
typedef int16_t HalfShorts __attribute__((vector_size(kBytes / 2)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef int64_t Longs __attribute__((vector_size(kBytes)));
typedef int32_t HalfInts __attribute__((vector_size(kBytes / 2)));
typedef float HalfFloats __attribute__((vector_size(kBytes / 2)));

constexpr int kColumns = ProductJob::kColumns;
constexpr int kWords = kBytes / 4, kVectors = kColumns / kWords;        // vectors of 32-bit lanes
constexpr int kPairs = kBytes / 8, kDoubleVectors = kColumns / kPairs;  // of 64-bit lanes
constexpr int kShortVectors = kColumns * 2 / kBytes;
constexpr int kExactTerms = 16;  // terms below 2^27 whose sum fits in an int32

template <class V, class T>
inline V read(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V, class T>
inline void write(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

template <class To, class From>
inline To cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof(To));
  return y;
}

template <class V>
inline V larger(V x, V y) {
  return x > y ? x : y;
}

// One step: c = c + the products of `count` elements of a row of a and of the columns of b.
inline void add_step(const ProductJob& job, const float* a, const int16_t* a_exponents, const float* b, const int16_t* b_exponents,
                     int count, float* c) {
  alignas(64) int16_t largest[kColumns];
  Shorts most[kShortVectors];
  for (int v = 0; v < kShortVectors; ++v) most[v] = Shorts{} - static_cast<int16_t>(1 << 14);
  for (int l = 0; l < count; ++l) {
    const Shorts own = Shorts{} + a_exponents[l];
    for (int v = 0; v < kShortVectors; ++v) {
      most[v] = larger<Shorts>(most[v], own + read<Shorts>(b_exponents + l * kColumns + v * (kBytes / 2)));
    }
  }
  for (int v = 0; v < kShortVectors; ++v) write(largest + v * (kBytes / 2), most[v]);

  alignas(64) int32_t tops[kColumns];
  Ints base[kVectors], sums[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const Ints bits = read<Ints>(c + v * kWords), magnitude = bits & 0x7FFFFFFF;
    Ints own = larger<Ints>(magnitude >> 23, Ints{} + 1) - 127;
    own = magnitude == 0 ? Ints{} - (1 << 14) : own;
    const Ints products = __builtin_convertvector(read<HalfShorts>(largest + v * kWords), Ints);
    const Ints top = larger<Ints>(larger<Ints>(own, products), Ints{} + job.floor);
    write(tops + v * kWords, top);
    base[v] = job.fraction + 127 - top;
    sums[v] = Ints{};
  }

  alignas(64) double totals[kColumns] = {};
  for (int l = 0; l < count; ++l) {
    const Floats digits = Floats{} + a[l];
    const Ints exponent = Ints{} + static_cast<int32_t>(a_exponents[l]);
    for (int v = 0; v < kVectors; ++v) {
      const Ints of_b = __builtin_convertvector(read<HalfShorts>(b_exponents + l * kColumns + v * kWords), Ints);
      const Ints field = larger<Ints>(of_b + (base[v] + exponent), Ints{});
      const Floats term = digits * read<Floats>(b + l * kColumns + v * kWords) * cast<Floats>(field << 23);
      sums[v] += __builtin_convertvector(term, Ints);
    }
    if (l % kExactTerms == kExactTerms - 1 || l == count - 1) {
      for (int v = 0; v < kVectors; ++v) {
        alignas(64) int32_t some[kWords];
        write(some, sums[v]);
        for (int half = 0; half < 2; ++half) {
          double* const to = totals + v * kWords + half * kPairs;
          write(to, read<Doubles>(to) + __builtin_convertvector(read<HalfInts>(some + half * kPairs), Doubles));
        }
        sums[v] = Ints{};
      }
    }
  }

  for (int v = 0; v < kDoubleVectors; ++v) {
    float* const at = c + v * kPairs;
    const HalfFloats before = read<HalfFloats>(at);
    const Longs top = __builtin_convertvector(read<HalfInts>(tops + v * kPairs), Longs);
    const Doubles up = cast<Doubles>((1023 + job.fraction - top) << 52), down = cast<Doubles>((1023 - job.fraction + top) << 52);
    const HalfInts special = cast<HalfInts>(before) & 0x7F800000;
    const HalfInts finite = special != 0x7F800000;
    // Infinities and NaN stay what they are; zeros stand for them until then.
    const HalfFloats own = cast<HalfFloats>(cast<HalfInts>(before) & finite);
    const HalfInts cut = __builtin_convertvector(__builtin_convertvector(own, Doubles) * up, HalfInts);
    const Doubles total = read<Doubles>(totals + v * kPairs) + __builtin_convertvector(cut, Doubles);
    // Truncates to the accumulator's mantissa, and to fp32's smallest spacing.
    const Doubles exact = total * down;
    const Longs field = cast<Longs>(exact) >> 52 & 0x7FF;
    const Longs dropped = 52 - job.mantissa + larger<Longs>((1023 - 126) - field, Longs{});
    const Longs kept = dropped > 52 ? Longs{} : (Longs{} - 1) << (dropped > 52 ? Longs{} : dropped);
    const HalfFloats after = __builtin_convertvector(cast<Doubles>(cast<Longs>(exact) & kept), HalfFloats);
    write(at, (cast<HalfInts>(after) & finite) | (cast<HalfInts>(before) & ~finite));
  }
}

// Replaces the sums of a step that infinities or NaN took part in; `before` is c before that step.
inline void add_specials(const uint8_t* a, const uint8_t* b, int count, const float* before, float* c) {
  for (int j = 0; j < kColumns; ++j) {
    bool nan = std::isnan(before[j]), positive = before[j] == INFINITY, negative = before[j] == -INFINITY;
    for (int l = 0; l < count; ++l) {
      const int kinds[] = {a[l] & 3, b[l * kColumns + j] & 3};
      nan = nan || kinds[0] == ProductJob::kNan || kinds[1] == ProductJob::kNan;
      if (kinds[0] != ProductJob::kInfinite && kinds[1] != ProductJob::kInfinite) continue;
      nan = nan || kinds[0] == ProductJob::kZero || kinds[1] == ProductJob::kZero;
      const bool below = (a[l] ^ b[l * kColumns + j]) & ProductJob::kNegative;
      positive = positive || !below, negative = negative || below;
    }
    if (positive || negative) c[j] = positive ? INFINITY : -INFINITY;
    if (nan || (positive && negative)) c[j] = NAN;
  }
}

}  // namespace product_detail

void product(const ProductJob& job, int64_t task) {
  using namespace product_detail;
  const int64_t block = task % job.column_tasks(), column = block * kColumns;
  const int64_t first = task / job.column_tasks() * ProductJob::kRows, last = first + ProductJob::kRows < job.m ? first + ProductJob::kRows : job.m;
  const int64_t columns = job.n - column < kColumns ? job.n - column : kColumns;
  const int64_t part = job.promotion > 0 ? job.promotion : (job.k > 0 ? job.k : 1);
  const float *b = job.b_digits + block * job.k * kColumns;
  const int16_t* b_exponents = job.b_exponents + block * job.k * kColumns;
  const uint8_t* b_kinds = job.b_kinds + block * job.k * kColumns;
  for (int64_t row = first; row < last; ++row) {
    alignas(64) float total[kColumns] = {}, sums[kColumns], before[kColumns];
    const bool special = job.a_special[row] || job.b_special[block];
    for (int64_t start = 0; start < job.k; start += part) {
      const int64_t stop = start + part < job.k ? start + part : job.k;
      std::memset(sums, 0, sizeof(sums));
      for (int64_t l = start; l < stop; l += job.length) {
        const int count = static_cast<int>(stop - l < job.length ? stop - l : job.length);
        if (special) std::memcpy(before, sums, sizeof(sums));
        add_step(job, job.a_digits + row * job.k + l, job.a_exponents + row * job.k + l, b + l * kColumns, b_exponents + l * kColumns,
                 count, sums);
        if (special) add_specials(job.a_kinds + row * job.k + l, b_kinds + l * kColumns, count, before, sums);
      }
      if (job.promotion == 0) {
        std::memcpy(total, sums, sizeof(sums));
      } else if (!job.of_parts) {
        for (int j = 0; j < kColumns; ++j) total[j] += sums[j];
      } else {
        const float* of_b = job.b_scales + column * job.b_row + start / part * job.b_part;
        const float of_a = job.a_scales[row * job.a_row + start / part * job.a_part];
        for (int j = 0; j < columns; ++j) total[j] = std::fma(of_a * of_b[j * job.b_row], sums[j], total[j]);
      }
    }
    float* const out = job.out + row * job.n + column;
    for (int j = 0; j < columns; ++j) {
      float x = total[j];
      if (!job.of_parts) x = x * *job.a_scales * *job.b_scales;
      if (job.bias != nullptr) x += job.bias[column + j];
      if (job.addend != nullptr) x += job.addend[row * job.n + column + j];
      out[j] = std::isnan(x) ? bit_cast<float>(kNan) : x;
    }
  }
}

}  // namespace BLOCKFP_ISA
}  // namespace blockfp
