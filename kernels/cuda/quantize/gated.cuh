// Elements computed by an activation, in registers: loading gate, up and gradient, the activations, and their derivatives.
//
// The bits are those of PyTorch's eager operations on this device, each of which computes in fp32 and rounds to T. So the
// expressions are written like PyTorch's and contracted alike. Whether they agree is tested at run time, over all values of a
// gate (torch_backend/ops/layer/gated_kernels.py), because another PyTorch may compute differently.
#pragma once

#include <type_traits>

#include "arguments.h"
#include "rounded.cuh"

namespace blockfp {
namespace cuda {

template <Activation A>
using OfActivation = std::integral_constant<Activation, A>;

// Calls body with an activation as a type.
template <class Body>
__device__ __forceinline__ void with_activation(Activation activation, Body body) {
  if (activation == Activation::kSilu) {
    body(OfActivation<Activation::kSilu>{});
  } else if (activation == Activation::kGeluTanh) {
    body(OfActivation<Activation::kGeluTanh>{});
  } else if (activation == Activation::kGeluErf) {
    body(OfActivation<Activation::kGeluErf>{});
  } else {
    body(OfActivation<Activation::kRelu2>{});
  }
}

constexpr double kRootTwo = 1.41421356237309504880, kTwoOverRootPi = 1.12837916709551257390, kRootHalf = 0.70710678118654752440;
constexpr float kGeluBeta = kRootTwo * kTwoOverRootPi * 0.5, kGeluKappa = 0.044715, kGeluAlpha = kRootHalf;
constexpr float kGeluDensity = kTwoOverRootPi * kRootHalf * 0.5;

template <Activation A>
__device__ __forceinline__ float activation_of(float x) {
  if constexpr (A == Activation::kSilu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (A == Activation::kGeluTanh) {
    const float cube = x * x * x;
    const float inner = kGeluBeta * (x + kGeluKappa * cube);
    return 0.5f * x * (1.0f + tanhf(inner));
  } else if constexpr (A == Activation::kGeluErf) {
    return x * 0.5f * (1.0f + erff(x * kGeluAlpha));
  } else {
    return x <= 0.0f ? 0.0f : x * x;
  }
}

// dy times the derivative at x, both of dtype T.
template <Activation A, class T>
__device__ __forceinline__ float activation_gradient_of(float dy, float x) {
  if constexpr (A == Activation::kSilu) {
    const float s = 1.0f / (1.0f + expf(-x));
    return dy * s * (1.0f + x * (1.0f - s));
  } else if constexpr (A == Activation::kGeluTanh) {
    const float square = x * x;
    const float cube = square * x;
    const float inner = kGeluBeta * (x + kGeluKappa * cube);
    const float tanh_inner = tanhf(inner);
    const float left = 0.5f * x;
    const float right = 1.0f + tanh_inner;
    const float left_derivative = 0.5f * right;
    const float tanh_derivative = 1.0f - tanh_inner * tanh_inner;
    const float inner_derivative = kGeluBeta * (1.0f + 3.0f * kGeluKappa * square);
    const float right_derivative = left * tanh_derivative * inner_derivative;
    return dy * (left_derivative + right_derivative);
  } else if constexpr (A == Activation::kGeluErf) {
    const float cdf = 0.5f * (1.0f + erff(x * kGeluAlpha));
    const float pdf = expf(-0.5f * x * x) * kGeluDensity;
    return dy * (cdf + x * pdf);
  } else {
    // Doubling is exact but for float16's overflow, which PyTorch rounds to Inf.
    const float slope = T::kId == Fp16::kId && x > 32752.0f ? INFINITY : 2.0f * x;
    return x <= 0.0f ? 0.0f : dy * slope;
  }
}

template <class T>
__device__ __forceinline__ Eight<T> times(const Eight<T>& a, const Eight<T>& b) {
  return rounded<T>([&](int i) { return __fmul_rn(value<T>(a, i), value<T>(b, i)); });
}

template <Activation A, class T>
__device__ __forceinline__ Eight<T> activation_of(const Eight<T>& gate) {
  return rounded<T>([&](int i) { return activation_of<A>(value<T>(gate, i)); });
}

// Eight adjacent elements of the gate and of up.
template <class T>
struct GateAndUp {
  using How = Gated;
  Eight<T> gate, up;

  __device__ __forceinline__ static const How& how(const QuantizeArguments& a) { return a.gated; }

  // Loads from row `row`, starting at `column`, a multiple of eight; rows are aligned for vectors.
  __device__ __forceinline__ void load(const Matrices& x, const Gated& g, int64_t row, int64_t column) {
    using Raw = typename T::Raw;
    const Raw* at = static_cast<const Raw*>(x.data) + row * x.row_stride;
    if (g.pairs) {
      const Eight<T> first = load_vector<T>(at + 2 * column), second = load_vector<T>(at + 2 * column + 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        gate.word[i] = __byte_perm(first.word[2 * i], first.word[2 * i + 1], 0x5410);
        up.word[i] = __byte_perm(first.word[2 * i], first.word[2 * i + 1], 0x7632);
        gate.word[i + 2] = __byte_perm(second.word[2 * i], second.word[2 * i + 1], 0x5410);
        up.word[i + 2] = __byte_perm(second.word[2 * i], second.word[2 * i + 1], 0x7632);
      }
    } else {
      gate = load_vector<T>(at + column);
      if (g.up != nullptr) up = load_vector<T>(static_cast<const Raw*>(g.up) + row * g.up_stride + column);
    }
  }

  template <Activation A>
  __device__ __forceinline__ Eight<T> made(const Gated& g) const {
    const Eight<T> out = activation_of<A, T>(gate);
    return g.up == nullptr ? out : times<T>(out, up);
  }
};

// The gradient of the gate, where `dy` is that of the activation's output without up.
template <Activation A, class T>
__device__ __forceinline__ Eight<T> activation_gradient_of(const Eight<T>& dy, const Eight<T>& gate) {
  return rounded<T>([&](int i) { return activation_gradient_of<A, T>(value<T>(dy, i), value<T>(gate, i)); });
}

// What eight adjacent elements of the gradients of gate and up are computed from.
template <class T>
struct GradientSources {
  using How = GatedGradient;
  Eight<T> gradient, gate, up;  // of pairs: four elements of the gradient, and gate holds four pairs
  bool of_up;

  __device__ __forceinline__ static const How& how(const QuantizeArguments& a) { return a.gradient; }

  // Loads for elements from `column` on, a multiple of eight.
  __device__ __forceinline__ void load(const Matrices& x, const GatedGradient& g, int64_t row, int64_t column) {
    using Raw = typename T::Raw;
    const Raw* at = static_cast<const Raw*>(x.data) + row * x.row_stride;
    const Raw* dy = static_cast<const Raw*>(g.gradient) + row * g.gradient_stride;
    if (g.pairs) {
      const uint2 four = __ldg(reinterpret_cast<const uint2*>(dy + column / 2));
      gradient.word[0] = four.x, gradient.word[1] = four.y;
      gate = load_vector<T>(at + column);
      return;
    }
    column += g.first;
    of_up = column >= g.gate_columns;
    if (of_up) column -= g.gate_columns;
    gradient = load_vector<T>(dy + column);
    gate = load_vector<T>(at + column);
    if (g.up != nullptr && !of_up) up = load_vector<T>(static_cast<const Raw*>(g.up) + row * g.up_stride + column);
  }

  template <Activation A>
  __device__ __forceinline__ Eight<T> made(const GatedGradient& g) const {
    if (g.pairs) {
      const auto of = [&](int i) { return value<T>(gate, i / 2 * 2); };
      const auto dy = [&](int i) { return value<T>(gradient, i / 2); };
      const Eight<T> inner =
          rounded<T>([&](int i) { return i % 2 ? activation_of<A>(of(i)) : __fmul_rn(dy(i), value<T>(gate, i + 1)); });
      return rounded<T>([&](int i) {
        return i % 2 ? __fmul_rn(dy(i), value<T>(inner, i)) : activation_gradient_of<A, T>(value<T>(inner, i), of(i));
      });
    }
    if (of_up) return times<T>(gradient, activation_of<A, T>(gate));
    return activation_gradient_of<A, T>(g.up == nullptr ? gradient : times<T>(gradient, up), gate);
  }
};

// The inverse of GateAndUp::load.
template <class T>
__device__ __forceinline__ void store_gate_and_up(const Matrices& x, const Gated& g, int64_t row, int64_t column, const Eight<T>& gate,
                                                  const Eight<T>& up) {
  using Raw = typename T::Raw;
  Raw* at = static_cast<Raw*>(const_cast<void*>(x.data)) + row * x.row_stride;
  if (g.pairs) {
    Eight<T> first, second;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      first.word[2 * i] = __byte_perm(gate.word[i], up.word[i], 0x5410);
      first.word[2 * i + 1] = __byte_perm(gate.word[i], up.word[i], 0x7632);
      second.word[2 * i] = __byte_perm(gate.word[i + 2], up.word[i + 2], 0x5410);
      second.word[2 * i + 1] = __byte_perm(gate.word[i + 2], up.word[i + 2], 0x7632);
    }
    store_vector<T>(at + 2 * column, first);
    store_vector<T>(at + 2 * column + 8, second);
  } else {
    store_vector<T>(at + column, gate);
    if (g.up != nullptr) store_vector<T>(static_cast<Raw*>(const_cast<void*>(g.up)) + row * g.up_stride + column, up);
  }
}

}  // namespace cuda
}  // namespace blockfp
