/* Products of weights of 16, 8 and 4 bits, in the instructions that multiply those: AVX-512 VNNI and BF16.

   Letters as in `__init__.py`. A panel is 32 outputs. Weights of bfloat16 are `[O / 32, I / 2, 32, 2]`, bytes
   `[O / 32, I / 4, 32, 4]`, of 4 bits the same with outputs 0 to 15 in the low half of a byte and 16 to 31 in the high
   one. Integers are multiplied exactly, into 32 bits: weights without a sign by digits with one, so that a zero point
   is taken off a group's sum by the sum of its digits, whatever it is. Each output's sum is that of one row alone, in
   the same order, whatever rows are beside it and however panels are divided among threads. */

#include <immintrin.h>
#define NARROW __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma")))
#define INLINE NARROW __attribute__((always_inline)) static inline
enum { LANES_ = 16, BLOCK = 12, LARGEST = 127, STEP = 254 };

/* By rows of a tile, whose sums are in registers only where their number is a constant. */
#define BY_ROWS(rows, call)                                                                                            \
    switch (rows) {                                                                                                    \
        case 1: call(1); break;                                                                                        \
        case 2: call(2); break;                                                                                        \
        case 3: call(3); break;                                                                                        \
        case 4: call(4); break;                                                                                        \
        case 5: call(5); break;                                                                                        \
        case 6: call(6); break;                                                                                        \
        case 7: call(7); break;                                                                                        \
        case 8: call(8); break;                                                                                        \
        case 9: call(9); break;                                                                                        \
        case 10: call(10); break;                                                                                      \
        case 11: call(11); break;                                                                                      \
        default: call(12);                                                                                             \
    }
#define ROWS_OF for (int i = 0; i < rows; i++)
#define UNROLL _Pragma("GCC unroll 12")

/* ---- bfloat16 in pairs ---- */

INLINE __m512 pair(const uint16_t *x) {
    int32_t both;
    memcpy(&both, x, 4);
    return (__m512)_mm512_set1_epi32(both);
}

INLINE void tile_pairs(const uint16_t *x, long x_stride, const uint16_t *w, long pairs, const float *bias, int wide,
                       uint16_t *y, long y_stride, const char *next, long step, const int rows) {
    __m512 sum[BLOCK][2];
    __mmask16 first = wide >= LANES_ ? 0xffff : (1 << wide) - 1;
    __mmask16 second = wide >= WIDE ? 0xffff : wide > LANES_ ? (1 << (wide - LANES_)) - 1 : 0;
    UNROLL ROWS_OF {
        sum[i][0] = bias ? _mm512_maskz_loadu_ps(first, bias) : _mm512_setzero_ps();
        sum[i][1] = bias ? _mm512_maskz_loadu_ps(second, bias + LANES_) : _mm512_setzero_ps();
    }
    for (long p = 0; p < pairs; p++, w += 2 * WIDE, next += step) {
        __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + WIDE);
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + step / 2, 0, 2);
        UNROLL ROWS_OF {
            __m512bh both = (__m512bh)pair(x + i * x_stride + 2 * p);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], low, both);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], high, both);
        }
    }
    UNROLL ROWS_OF {
        _mm256_mask_storeu_epi16(y + i * y_stride, first, (__m256i)_mm512_cvtneps_pbh(sum[i][0]));
        _mm256_mask_storeu_epi16(y + i * y_stride + LANES_, second, (__m256i)_mm512_cvtneps_pbh(sum[i][1]));
    }
}

NARROW static void panels_pairs(const void *job, long from, long to) {
    const struct halves *in = job;
    long blocks = (in->rows + BLOCK - 1) / BLOCK, size = in->pairs * WIDE * 2;
    for (long panel = from; panel < to; panel++) {
        const uint16_t *w = in->w + panel * size;
        const float *bias = in->bias ? in->bias + panel * WIDE : 0;
        int wide = in->outputs - panel * WIDE < WIDE ? in->outputs - panel * WIDE : WIDE;
        long step = WIDE * 4 / blocks;
        for (long row = 0, block = 0; block < blocks; block++) {
            long some = (in->rows - row + blocks - block - 1) / (blocks - block);
            const char *next = (const char *)(w + size) + block * step * in->pairs;
            uint16_t *y = in->y + row * in->outputs + panel * WIDE;
#define CALL(n)                                                                                                        \
    tile_pairs(in->x + row * in->x_stride, in->x_stride, w, in->pairs, bias, wide, y, in->outputs, next, step, n)
            BY_ROWS(some, CALL)
#undef CALL
            row += some;
        }
    }
}

/* ---- Integers ---- */

struct integers {
    const void *x; /* [N, I], float32 or bfloat16 */
    const uint8_t *w, *zeros; /* zeros [O / 32, G, 32] */
    const float *scales, *bias; /* scales as zeros */
    void *y;                    /* [N, O] as x */
    int8_t *digit;              /* [D * N, stride], all digits of a row before the next row's; or in tiles (tiles.h) */
    int32_t *total;             /* [D * N, G]: sums of digits */
    float *row_scale;           /* [N] */
    long x_stride, stride, rows, inputs, outputs, groups, group_size;
    int bits, half, digits, tiled;
};

/* Where the digits of a row lie from input `c` on; LANES_ of them are together. */
INLINE int8_t *digits_at(const struct integers *in, long row, long c) {
    if (!in->tiled) return in->digit + row * in->stride + c;
    return in->digit + row / TILE_HEIGHT * TILE_HEIGHT * in->stride + c / TILE_BYTES * TILE_HEIGHT * TILE_BYTES +
           row % TILE_HEIGHT * TILE_BYTES + c % TILE_BYTES;
}

/* Rows as digits: the sum of `scale * digit / 254 ** number` is the row, to within half a step of the last. */
NARROW static void to_digits(const void *job, long from, long to) {
    const struct integers *in = job;
    for (long row = from; row < to; row++) {
        const uint16_t *halves = (const uint16_t *)in->x + row * in->x_stride;
        const float *floats = (const float *)in->x + row * in->x_stride;
        __m512i most = _mm512_setzero_si512(); /* As integers, of which a NaN is the largest: it becomes the scale. */
#define LOAD(at, mask)                                                                                                 \
    (in->half ? (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, halves + (at))), 16)    \
              : _mm512_maskz_loadu_ps(mask, floats + (at)))
#define MASK(at) (in->inputs - (at) >= LANES_ ? 0xffff : (1 << (in->inputs - (at))) - 1)
        for (long c = 0; c < in->inputs; c += LANES_)
            most = _mm512_max_epu32(most, (__m512i)_mm512_abs_ps(LOAD(c, MASK(c))));
        uint32_t bits = _mm512_reduce_max_epu32(most);
        float largest;
        memcpy(&largest, &bits, 4);
        float scale = (largest < 1e-30f ? 1e-30f : largest) / LARGEST;
        in->row_scale[row] = scale;
        int32_t *total = in->total + row * in->digits * in->groups;
        memset(total, 0, in->digits * in->groups * 4);
        for (long g = 0; g < in->groups; g++) {
            long end = (g + 1) * in->group_size < in->stride ? (g + 1) * in->group_size : in->stride;
            __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
            for (long c = g * in->group_size; c < end; c += LANES_) {
                __mmask16 there = end - c >= LANES_ ? 0xffff : (1 << (end - c)) - 1;
                __mmask16 mask = in->inputs > c ? there & MASK(c) : 0;
                __m512 rest = _mm512_div_ps(LOAD(c, mask), _mm512_set1_ps(scale));
                for (int d = 0; d < in->digits; d++) {
                    __m512i value = _mm512_cvtps_epi32(rest);
                    _mm_mask_storeu_epi8(digits_at(in, row * in->digits + d, c), there, _mm512_cvtepi32_epi8(value));
                    sums[d] = _mm512_add_epi32(sums[d], value);
                    rest = _mm512_mul_ps(_mm512_sub_ps(rest, _mm512_cvtepi32_ps(value)), _mm512_set1_ps(STEP));
                }
            }
            for (int d = 0; d < in->digits; d++) total[d * in->groups + g] = _mm512_reduce_add_epi32(sums[d]);
        }
#undef LOAD
#undef MASK
    }
}

/* Four products a lane, added to its sum. GCC 12 copies and spills the sums of the intrinsic. */
INLINE void dot(__m512i *sum, __m512i weights, __m512i digits) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(weights), "v"(digits));
}

INLINE __m512i four(const int8_t *x) {
    int32_t all;
    memcpy(&all, x, 4);
    return _mm512_set1_epi32(all);
}

/* The sum of a group, scaled, added to those of the groups before it. */
INLINE void add_group(float *to, __m512i part, __m512 scale, long group) {
    __m512 found = _mm512_cvtepi32_ps(part);
    _mm512_storeu_ps(to, group ? _mm512_fmadd_ps(found, scale, _mm512_loadu_ps(to)) : _mm512_mul_ps(found, scale));
}

/* Sums of `rows` digits by one panel, groups added up in float: `sum` is [rows, 32]. */
INLINE void tile_integers(const struct integers *in, const int8_t *x, const int32_t *total, const uint8_t *w,
                          const uint8_t *zeros, const float *scales, float *sum, const char *next, long step,
                          const int rows, const int bits) {
    for (long g = 0; g < in->groups; g++) {
        __m512i part[BLOCK][2];
        UNROLL ROWS_OF part[i][0] = part[i][1] = _mm512_setzero_si512();
        long last = (g + 1) * in->group_size < in->stride ? (g + 1) * in->group_size : in->stride;
        for (long c = g * in->group_size; c < last; c += 4, w += 16 * bits, next += step) {
            __m512i low = _mm512_loadu_si512(w), high;
            __builtin_prefetch(next, 0, 2);
            if (bits == 8) {
                high = _mm512_loadu_si512(w + 64);
                __builtin_prefetch(next + step / 2, 0, 2);
            } else {
                high = _mm512_and_si512(_mm512_srli_epi16(low, 4), _mm512_set1_epi8(15));
                low = _mm512_and_si512(low, _mm512_set1_epi8(15));
            }
            UNROLL ROWS_OF {
                __m512i digits = four(x + i * in->stride + c);
                dot(&part[i][0], low, digits);
                dot(&part[i][1], high, digits);
            }
        }
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) { /* Indexed by constants alone, sums are in registers. */
            __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(zeros + g * WIDE + j * LANES_)));
            __m512 scale = _mm512_loadu_ps(scales + g * WIDE + j * LANES_);
            UNROLL ROWS_OF {
                __m512i off = _mm512_mullo_epi32(zero, _mm512_set1_epi32(total[i * in->groups + g]));
                add_group(sum + i * WIDE + j * LANES_, _mm512_sub_epi32(part[i][j], off), scale, g);
            }
        }
    }
}

/* The digits of each row put together, into its outputs of one panel. */
INLINE void put_together(const struct integers *in, const float *sum, long panel) {
    long first = panel * WIDE;
    for (int j = 0; j < 2 && first + j * LANES_ < in->outputs; j++) {
        long left = in->outputs - first - j * LANES_;
        __mmask16 mask = left >= LANES_ ? 0xffff : (1 << left) - 1;
        __m512 bias = in->bias ? _mm512_maskz_loadu_ps(mask, in->bias + first + j * LANES_) : _mm512_setzero_ps();
        for (long row = 0; row < in->rows; row++) {
            const float *digit = sum + row * in->digits * WIDE + j * LANES_;
            __m512 found = _mm512_loadu_ps(digit + (in->digits - 1) * WIDE);
            for (int d = in->digits - 2; d >= 0; d--)
                found = _mm512_fmadd_ps(found, _mm512_set1_ps(1.0f / STEP), _mm512_loadu_ps(digit + d * WIDE));
            found = _mm512_fmadd_ps(found, _mm512_set1_ps(in->row_scale[row]), bias);
            long at = row * in->outputs + first + j * LANES_;
            if (in->half) _mm256_mask_storeu_epi16((uint16_t *)in->y + at, mask, (__m256i)_mm512_cvtneps_pbh(found));
            else _mm512_mask_storeu_ps((float *)in->y + at, mask, found);
        }
    }
}

NARROW static void panels_integers(const void *job, long from, long to) {
    const struct integers *in = job;
    long rows = in->rows * in->digits, blocks = (rows + BLOCK - 1) / BLOCK, size = in->stride * 4 * in->bits;
    long step = 16 * in->bits / blocks;
    float sum[ROWS * WIDE];
    for (long panel = from; panel < to; panel++) {
        const uint8_t *w = in->w + panel * size, *zeros = in->zeros + panel * in->groups * WIDE;
        const float *scales = in->scales + panel * in->groups * WIDE;
        for (long row = 0, block = 0; block < blocks; block++) {
            long some = (rows - row + blocks - block - 1) / (blocks - block);
            const int8_t *x = in->digit + row * in->stride;
            const int32_t *total = in->total + row * in->groups;
            const char *next = (const char *)w + size + block * step * (in->stride / 4);
#define CALL(n) tile_integers(in, x, total, w, zeros, scales, sum + row * WIDE, next, step, n, bits)
            if (in->bits == 8) {
                enum { bits = 8 };
                BY_ROWS(some, CALL)
            } else {
                enum { bits = 4 };
                BY_ROWS(some, CALL)
            }
#undef CALL
            row += some;
        }
        put_together(in, sum, panel);
    }
}
