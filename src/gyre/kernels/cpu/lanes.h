/* Lanes: sixteen numbers at a time. Vector types, conversions, exp, transposes. For processors with AVX-512 (build.py
 * asks for it); its bfloat16 products are used where there are some.
 * GYRE_BF16 = 1: `real`, the type of weights and KV, is bfloat16, and `rounded` rounds to it where torch would.
 * GYRE_BF16 = 0: `real` is float32, and `rounded` does nothing. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <immintrin.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float v16 __attribute__((vector_size(64)));
typedef float v16_any __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint32_t u16_any __attribute__((vector_size(64), aligned(4)));
typedef uint16_t h16_any __attribute__((vector_size(32), aligned(2)));
typedef double d8 __attribute__((vector_size(64)));
typedef float v8 __attribute__((vector_size(32)));

#if GYRE_BF16
typedef uint16_t real;
#define PAIR 2 /* numbers in one 32-bit lane of a panel */
#else
typedef float real;
#define PAIR 1
#endif

INLINE v16 load(const float *at) { return *(const v16_any *)at; }
INLINE void store(float *at, v16 x) { *(v16_any *)at = x; }
INLINE v16 spread(float x) { return x - (v16){0}; }
INLINE v16 choose(i16 mask, v16 yes, v16 no) { return (v16)((mask & (i16)yes) | (~mask & (i16)no)); }

INLINE v16 larger(v16 a, v16 b) {
    return (v16)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE float max_of(v16 x) {
    float most = x[0];
    UNROLL for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

INLINE float sum_of(v16 x) {
    return _mm512_reduce_add_ps((__m512)x);
}

INLINE d8 low_half(v16 x) { return __builtin_convertvector(((union { v16 w; v8 h[2]; }){.w = x}).h[0], d8); }
INLINE d8 high_half(v16 x) { return __builtin_convertvector(((union { v16 w; v8 h[2]; }){.w = x}).h[1], d8); }

/* Round to nearest bfloat16, ties to even; NaN of the hardware's kind stays NaN. */
INLINE u16 rounded_bits(v16 x) {
    u16 bits = (u16)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}

#if GYRE_BF16
INLINE v16 rounded(v16 x) { return (v16)rounded_bits(x); }
INLINE float widen(real x) { return ((union { uint32_t u; float f; }){(uint32_t)x << 16}).f; }
INLINE real narrow(float x) {
    uint32_t bits = ((union { float f; uint32_t u; }){x}).u;
    return (real)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE v16 load_real(const real *at) { return (v16)(__builtin_convertvector(*(const h16_any *)at, u16) << 16); }
INLINE void store_real(real *at, v16 x) { *(h16_any *)at = __builtin_convertvector(rounded_bits(x) >> 16, h16_any); }
#else
INLINE v16 rounded(v16 x) { return x; }
INLINE float widen(real x) { return x; }
INLINE real narrow(float x) { return x; }
INLINE v16 load_real(const real *at) { return load(at); }
INLINE void store_real(real *at, v16 x) { store(at, x); }
#endif
INLINE float round_one(float x) { return widen(narrow(x)); }

/* exp to about one unit in the last place; 0 below -87.3, infinite above 88.7; NaN stays NaN. */
INLINE v16 exp_of(v16 x) {
    v16 bound = choose(x > spread(88.3762626f), spread(88.3762626f), x);
    v16 shifted = bound * 1.44269504f + 12582912.0f; /* rounds to an integer in the low bits */
    v16 count = shifted - 12582912.0f;
    v16 r = bound - count * 0.693359375f;
    r = r + count * 2.12194440e-4f;
    v16 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    i16 exponent = ((i16)shifted - 0x4b400000 + 127) << 23;
    v16 y = p * (v16)exponent;
    y = choose(x < spread(-87.33f), spread(0.0f), y);
    return choose(x > spread(88.722f), spread(INFINITY), y);
}

/* Turn 16 rows of 16 numbers into columns. */
INLINE void transpose(v16 r[LANES]) {
    UNROLL for (int i = 0; i < 8; i++) {
        v16 a = r[i], b = r[i + 8];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        r[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 4)) {
        v16 a = r[i], b = r[i + 4];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 2)) {
        v16 a = r[i], b = r[i + 2];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 1)) {
        v16 a = r[i], b = r[i + 1];
        r[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        r[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}
