/* Lanes: LANES numbers at a time. Vector types, conversions, exp, transposes: all that knows the processor's vectors.
 * The other files are written over this one. build.py picks the instruction set and passes the flags:
 * AVX-512 (F, BW): 16 lanes of float in 32 registers, and bfloat16 products where there are some.
 * AVX2 with FMA: 8 lanes in 16 registers.
 * GYRE_BF16 = 1: `real`, the type of weights and KV, is bfloat16, and `rounded` rounds to it where torch would.
 * GYRE_BF16 = 0: `real` is float32, and `rounded` does nothing. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <immintrin.h>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#define REGISTERS 32
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define REGISTERS 16
#else
#error "needs AVX-512 (F and BW), or AVX2 and FMA"
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#define VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef float vfloat VECTOR(LANES * 4);
typedef float vfloat_any __attribute__((vector_size(LANES * 4), aligned(2))); /* bfloat16 rows begin anywhere */
typedef int32_t vint VECTOR(LANES * 4);
typedef uint32_t vuint VECTOR(LANES * 4);
typedef uint32_t vuint_any __attribute__((vector_size(LANES * 4), aligned(2)));
typedef uint16_t vhalf_any __attribute__((vector_size(LANES * 2), aligned(2)));
typedef double vdouble VECTOR(LANES * 4); /* half as many */
typedef float vfloat_part VECTOR(LANES * 2);

#if GYRE_BF16
typedef uint16_t real;
#define PAIR 2 /* numbers in one 32-bit lane of a panel */
#else
typedef float real;
#define PAIR 1
#endif

/* a · b + sum is rounded once by `fused`, twice as a * b + sum: the compiler may not choose (-ffp-contract=off), since it
 * would in one shape of a tile and not in another, and bits would depend on a token's company. */
#if LANES == 16
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
INLINE vfloat larger(vfloat a, vfloat b) { return (vfloat)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vfloat fused(vfloat a, vfloat b, vfloat sum) {
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
}
INLINE vfloat root_of(vfloat x) { return (vfloat)_mm512_sqrt_ps((__m512)x); }
INLINE float sum_of(vfloat x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE double sum_of_doubles(vdouble x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
#else
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
INLINE vfloat larger(vfloat a, vfloat b) { return (vfloat)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vfloat fused(vfloat a, vfloat b, vfloat sum) {
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
}
INLINE vfloat root_of(vfloat x) { return (vfloat)_mm256_sqrt_ps((__m256)x); }
INLINE float sum_of(vfloat x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }
INLINE double sum_of_doubles(vdouble x) { return (x[0] + x[2]) + (x[1] + x[3]); }
#endif

INLINE vfloat load(const float *at) { return *(const vfloat_any *)at; }
INLINE void store(float *at, vfloat x) { *(vfloat_any *)at = x; }
INLINE vuint load_bits(const void *at) { return (vuint)*(const vuint_any *)at; }
INLINE vfloat spread(float x) { return x - (vfloat){0}; }
INLINE vuint spread_bits(uint32_t x) { return x + (vuint){0}; }
INLINE vint lane_numbers(void) { return (vint){LANE_NUMBERS}; }
INLINE vfloat choose(vint mask, vfloat yes, vfloat no) { return (vfloat)((mask & (vint)yes) | (~mask & (vint)no)); }

INLINE float max_of(vfloat x) {
    float most = x[0];
    UNROLL for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Numbers from `at` on, `fill` from the `count`-th lane on; nothing past them is read. */
INLINE vfloat load_some(const float *at, int64_t count, float fill) {
    if (count >= LANES) return load(at);
    vfloat x = spread(fill);
    for (int i = 0; i < count; i++) x[i] = at[i];
    return x;
}

typedef union {
    vfloat whole;
    vfloat_part half[2];
} Halves;

INLINE vdouble low_half(vfloat x) { return __builtin_convertvector(((Halves){.whole = x}).half[0], vdouble); }
INLINE vdouble high_half(vfloat x) { return __builtin_convertvector(((Halves){.whole = x}).half[1], vdouble); }

/* Round to nearest bfloat16, ties to even; NaN of the hardware's kind stays NaN. */
INLINE vuint rounded_bits(vfloat x) {
    vuint bits = (vuint)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
}

#if GYRE_BF16
INLINE vfloat rounded(vfloat x) { return (vfloat)rounded_bits(x); }
INLINE float widen(real x) { return ((union { uint32_t u; float f; }){(uint32_t)x << 16}).f; }
INLINE real narrow(float x) {
    uint32_t bits = ((union { float f; uint32_t u; }){x}).u;
    return (real)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE vfloat load_real(const real *at) {
    return (vfloat)(__builtin_convertvector(*(const vhalf_any *)at, vuint) << 16);
}
INLINE void store_real(real *at, vfloat x) {
    *(vhalf_any *)at = __builtin_convertvector(rounded_bits(x) >> 16, vhalf_any);
}
#else
INLINE vfloat rounded(vfloat x) { return x; }
INLINE float widen(real x) { return x; }
INLINE real narrow(float x) { return x; }
INLINE vfloat load_real(const real *at) { return load(at); }
INLINE void store_real(real *at, vfloat x) { store(at, x); }
#endif
INLINE float round_one(float x) { return widen(narrow(x)); }

/* exp to about one unit in the last place; 0 below -87.3, infinite above 88.7; NaN stays NaN. */
INLINE vfloat exp_of(vfloat x) {
    vfloat bound = choose(x > spread(88.3762626f), spread(88.3762626f), x);
    vfloat shifted = fused(bound, spread(1.44269504f), spread(12582912.0f)); /* rounds to an integer in the low bits */
    vfloat count = shifted - 12582912.0f;
    vfloat r = fused(count, spread(-0.693359375f), bound);
    r = fused(count, spread(2.12194440e-4f), r);
    vfloat p = fused(r, spread(1.9875691500e-4f), spread(1.3981999507e-3f));
    p = fused(p, r, spread(8.3334519073e-3f));
    p = fused(p, r, spread(4.1665795894e-2f));
    p = fused(p, r, spread(1.6666665459e-1f));
    p = fused(p, r, spread(5.0000001201e-1f));
    p = fused(p, r * r, r) + 1.0f;
    vint exponent = ((vint)shifted - 0x4b400000 + 127) << 23;
    vfloat y = p * (vfloat)exponent;
    y = choose(x < spread(-87.33f), spread(0.0f), y);
    return choose(x > spread(88.722f), spread(INFINITY), y);
}

/* sum + weight · x over the numbers that a 32-bit lane holds. Where one instruction takes both numbers of a pair, a step
 * has one part; otherwise part 0 is the first number and part 1 the second. All sums of a tile pass one part before the
 * other, so that few parts of factors are held at a time. */
#if GYRE_BF16 && !defined(__AVX512BF16__)
#define PARTS_OF_STEP 2
#else
#define PARTS_OF_STEP 1
#endif

INLINE vfloat part_of(int part, vuint x) {
    if (PARTS_OF_STEP == 1) return (vfloat)x;
    return part == 0 ? (vfloat)(x << 16) : (vfloat)(x & 0xffff0000u);
}

INLINE vfloat multiply_add(vfloat sum, vfloat x, vfloat weight) {
#if GYRE_BF16 && defined(__AVX512BF16__)
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)weight);
#else
    return fused(x, weight, sum);
#endif
}

/* Turn LANES rows of LANES numbers into columns. */
INLINE void transpose(vfloat r[LANES]) {
#if LANES == 16
    UNROLL for (int i = 0; i < 8; i++) {
        vfloat a = r[i], b = r[i + 8];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        r[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 4)) {
        vfloat a = r[i], b = r[i + 4];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 2)) {
        vfloat a = r[i], b = r[i + 2];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 1)) {
        vfloat a = r[i], b = r[i + 1];
        r[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        r[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
#else
    UNROLL for (int i = 0; i < 4; i++) {
        vfloat a = r[i], b = r[i + 4];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 2)) {
        vfloat a = r[i], b = r[i + 2];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & 1)) {
        vfloat a = r[i], b = r[i + 1];
        r[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
        r[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
#endif
}
