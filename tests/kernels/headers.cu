// Every function of the shared headers, instantiated in device code: compiled, not run (test_headers.py).
#include "blockfp/adamw.h"
#include "blockfp/dtypes.h"
#include "blockfp/elements.h"
#include "blockfp/hadamard.h"
#include "blockfp/kept_scales.h"
#include "blockfp/packing.h"
#include "blockfp/scales.h"
#include "blockfp/threefry.h"

using namespace blockfp;

template <class E, ScaleRule R, class T>
__device__ void one_element(const typename T::Raw* x, int32_t amax, uint64_t index, int32_t* codes, typename T::Raw* values) {
  BlockScale<float> scale;
  if constexpr (R == ScaleRule::kE4m3) {
    const float multiplier = tensor_multiplier<E>(amax, ScaleRule::kE4m3Guarded);
    scale = e4m3_scale<E, float>(amax, multiplier, divide(1.0f, multiplier), R);
  } else if constexpr (kE8m0Scale<R>) {
    scale = e8m0_scale<E, R, float>(amax);
  } else {
    scale = fp8_scale<E, R, float>(amax, 0, kFp32Max);
  }
  const float y = multiply(bit_cast<float>(widen<T, float>(*x)), scale.multiplier);
  codes[0] = encode_nearest<E, float>(y);
  codes[1] = encode_stochastic<E, float>(y, random_byte(1, 2, index));
  codes[1] ^= encode_stochastic<E, float, 16>(y, random_half(1, 2, index));
  if constexpr (R == ScaleRule::kE4m3) {
    scale.stored = kept_e4m3_scale<E>(scale.stored, amax, kept_tensor_scale<E>(kOne, amax));
  } else {
    scale.stored = kE8m0Scale<R> ? kept_e8m0_scale<E>(scale.stored, amax) : kept_fp32_scale<E>(scale.stored, amax);
  }
  scale.multiplier = stored_multiplier(R, scale.stored, 1.0f);
  const float value = multiply(decode<E, float>(codes[0] & 0xFF), decode_scale<R, float>(scale.stored, 1.0f));
  *values = static_cast<typename T::Raw>(narrow<T, float>(canonical<float>(to_bits(value))));
}

__global__ void everything(const uint16_t* half, const uint32_t* whole, int32_t* codes, uint16_t* half_out, uint32_t* out,
                           float* group, uint8_t* bytes) {
  one_element<E4M3, ScaleRule::kFp32, Bf16>(half, codes[0], 1, codes, half_out);
  one_element<E5M2, ScaleRule::kPow2, Fp16>(half, codes[0], 2, codes + 2, half_out + 1);
  one_element<E3M2, ScaleRule::kE8m0Ceil, Fp32>(whole, codes[0], 3, codes + 4, out);
  one_element<E2M3, ScaleRule::kE8m0Floor, Fp32>(whole, codes[0], 4, codes + 6, out + 1);
  one_element<E2M1, ScaleRule::kE4m3, Bf16>(half, codes[0], 5, codes + 8, half_out + 2);
  one_element<Int8, ScaleRule::kE8m0Ceil, Bf16>(half, codes[0], 6, codes + 10, half_out + 3);
  float x[kHadamardGroup];
  for (int i = 0; i < kHadamardGroup; ++i) x[i] = group[i];
  hadamard16<float>(x);
  for (int i = 0; i < kHadamardGroup; ++i) group[i] = x[i];
  unpack_group<6>(pack_group<4>(bytes), bytes + 4);
  group[0] = delayed_scale<float>(codes[0], group[1], group[0]);
}

__global__ void optimizer_step(StepEntry e, int32_t random, int32_t* codes, uint16_t* halves) {
  const Words<uint32_t> key = rounding_key(e.key0, e.key1, e.step, e.parameter, kRoundFirst);
  float first = 0.0f, second = 0.0f;
  adamw_step<float>(*e.weight, first, second, 1.0f, e.coefficients);
  codes[0] = encode_moment<false, float>(first, 1.0f, random ^ static_cast<int32_t>(key.w0));
  codes[1] = encode_moment<true, float>(square_root(second), 1.0f, random);
  halves[e.random_index(0, 0, 0) & 1] = static_cast<uint16_t>(narrow_stochastic<float>(first, random));
}
