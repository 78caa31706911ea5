// Vectors of 16 elements for every CPU, with GCC's vector extension. GCC keeps a vector that is wider than a register in memory,
// which is many times slower. A vector is therefore one AVX-512 register or a struct of smaller registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace cas {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kPartLanes = 16;  // 32-bit elements per register
#elif defined(__AVX2__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;  // registers per vector

#define CAS_INLINE __attribute__((always_inline))

#if defined(__AVX512F__)

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

inline f32x16 splat(float value) { return f32x16{} + value; }

// Converts each element to another type.
template <class To, class From>
CAS_INLINE inline To convert(From value) {
    return __builtin_convertvector(value, To);
}

// a where the mask is set, b elsewhere.
template <class V>
CAS_INLINE inline V select(i32x16 mask, V a, V b) {
    return mask ? a : b;
}

template <class V>
CAS_INLINE inline V& part(V& value, int) {
    return value;
}

#else

template <class E>
struct Vector {
    typedef E Part __attribute__((vector_size(kPartLanes * sizeof(E))));
    Part parts[kParts];

    E operator[](int i) const { return parts[i / kPartLanes][i % kPartLanes]; }

    // Reinterprets the bits as another type.
    template <class F>
    CAS_INLINE explicit operator Vector<F>() const {
        static_assert(sizeof(F) == sizeof(E));
        Vector<F> result;
        for (int i = 0; i < kParts; ++i) result.parts[i] = (typename Vector<F>::Part)parts[i];
        return result;
    }
};

using f32x16 = Vector<float>;
using i32x16 = Vector<int32_t>;
using u32x16 = Vector<uint32_t>;
using u16x16 = Vector<uint16_t>;
using i8x16 = Vector<int8_t>;
using u8x16 = Vector<uint8_t>;

template <class T>
concept Scalar = std::is_arithmetic_v<T>;

#define CAS_EACH_PART(expression)                            \
    for (int i = 0; i < kParts; ++i) result.parts[i] = expression; \
    return result

#define CAS_OPERATOR(op, Result)                                                       \
    template <class E>                                                                 \
    CAS_INLINE inline Vector<Result> operator op(const Vector<E>& a, const Vector<E>& b) { \
        Vector<Result> result;                                                         \
        CAS_EACH_PART(a.parts[i] op b.parts[i]);                                       \
    }                                                                                  \
    template <class E, Scalar S>                                                       \
    CAS_INLINE inline Vector<Result> operator op(const Vector<E>& a, S b) {            \
        Vector<Result> result;                                                         \
        CAS_EACH_PART(a.parts[i] op E(b));                                             \
    }                                                                                  \
    template <class E, Scalar S>                                                       \
    CAS_INLINE inline Vector<Result> operator op(S a, const Vector<E>& b) {            \
        Vector<Result> result;                                                         \
        CAS_EACH_PART(E(a) op b.parts[i]);                                             \
    }

CAS_OPERATOR(+, E)
CAS_OPERATOR(-, E)
CAS_OPERATOR(*, E)
CAS_OPERATOR(/, E)
CAS_OPERATOR(&, E)
CAS_OPERATOR(|, E)
CAS_OPERATOR(<<, E)
CAS_OPERATOR(>>, E)
CAS_OPERATOR(<, int32_t)
CAS_OPERATOR(>, int32_t)
CAS_OPERATOR(==, int32_t)
CAS_OPERATOR(!=, int32_t)
#undef CAS_OPERATOR

template <class E>
CAS_INLINE inline Vector<E> operator-(const Vector<E>& a) {
    Vector<E> result;
    CAS_EACH_PART(-a.parts[i]);
}

template <class E>
CAS_INLINE inline Vector<E> operator~(const Vector<E>& a) {
    Vector<E> result;
    CAS_EACH_PART(~a.parts[i]);
}

template <class E, class Other>
CAS_INLINE inline Vector<E>& operator+=(Vector<E>& a, const Other& b) {
    return a = a + b;
}

inline f32x16 splat(float value) {
    f32x16 result;
    CAS_EACH_PART((f32x16::Part{} + value));
}

template <class To, class E>
CAS_INLINE inline To convert(const Vector<E>& value) {
    To result;
    CAS_EACH_PART(__builtin_convertvector(value.parts[i], typename To::Part));
}

template <class V>
CAS_INLINE inline V select(const i32x16& mask, const V& a, const V& b) {
    V result;
    CAS_EACH_PART((mask.parts[i] ? a.parts[i] : b.parts[i]));
}
#undef CAS_EACH_PART

// Register i, which holds the elements from i * kPartLanes on.
template <class V>
CAS_INLINE inline auto& part(V& value, int i) {
    return value.parts[i];
}

#endif

using PartF32 = std::remove_reference_t<decltype(part(std::declval<f32x16&>(), 0))>;
using PartI32 = std::remove_reference_t<decltype(part(std::declval<i32x16&>(), 0))>;
using PartU32 = std::remove_reference_t<decltype(part(std::declval<u32x16&>(), 0))>;

// Shuffle indices of one step of a transpose. distance: a power of two. A lane of the first register whose number has this bit
// is exchanged with the second register's lane `distance` below. Indices from kPartLanes on select from the second register.
struct Butterfly {
    PartU32 first{}, second{};
    CAS_INLINE explicit Butterfly(uint32_t distance) {
#pragma GCC unroll 16
        for (uint32_t lane = 0; lane < kPartLanes; ++lane) {
            first[lane] = (lane & distance) ? (lane - distance) + kPartLanes : lane;
            second[lane] = (lane & distance) ? lane + kPartLanes : lane + distance;
        }
    }
};

// Vectors are loaded and stored register by register: GCC keeps a vector that is copied as a whole in memory.
template <class V>
CAS_INLINE inline V load_raw(const void* address) {
    V value;
    if constexpr (requires { value.parts; }) {
        constexpr int kBytes = sizeof(value.parts[0]);
        for (int i = 0; i < int(sizeof(V)) / kBytes; ++i) std::memcpy(&value.parts[i], static_cast<const char*>(address) + i * kBytes, kBytes);
    } else {
        std::memcpy(&value, address, sizeof(V));
    }
    return value;
}

template <class V>
CAS_INLINE inline void store_raw(void* address, const V& value) {
    if constexpr (requires { value.parts; }) {
        constexpr int kBytes = sizeof(value.parts[0]);
        for (int i = 0; i < int(sizeof(V)) / kBytes; ++i) std::memcpy(static_cast<char*>(address) + i * kBytes, &value.parts[i], kBytes);
    } else {
        std::memcpy(address, &value, sizeof(V));
    }
}

}  // namespace cas
