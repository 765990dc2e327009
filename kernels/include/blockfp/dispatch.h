// Maps callers' numbers (kId) to the types that they stand for; the only list of these types.
#pragma once

#include "dtypes.h"
#include "elements.h"
#include "packing.h"

// Host only; always inlined, for the reason in lanes.h.
#define BLOCKFP_HOST inline __attribute__((always_inline))

namespace blockfp {

// Calls body with an instance of the element's struct.
template <class Body>
BLOCKFP_HOST auto with_element(int id, Body body) {
  switch (id) {
    case E4M3::kId:
      return body(E4M3{});
    case E5M2::kId:
      return body(E5M2{});
    case E3M2::kId:
      return body(E3M2{});
    case E2M3::kId:
      return body(E2M3{});
    case E2M1::kId:
      return body(E2M1{});
    default:
      return body(Int8{});
  }
}

// Calls body with an instance of the dtype's struct.
template <class Body>
BLOCKFP_HOST auto with_dtype(int id, Body body) {
  switch (id) {
    case Fp32::kId:
      return body(Fp32{});
    case Fp16::kId:
      return body(Fp16{});
    default:
      return body(Bf16{});
  }
}

// Bytes of a row of `columns` codes.
BLOCKFP_HOST int64_t code_row_bytes(int element, int64_t columns) {
  return with_element(element, [&](auto e) { return Packing<decltype(e)::kBits>::row_bytes(columns); });
}

}  // namespace blockfp
