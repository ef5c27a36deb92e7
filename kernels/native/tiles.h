/* Products of weights of 16, 8 and 4 bits in tiles (AMX): 16 rows by 16 outputs, over 64 bytes of inputs at a time.

   Weights as in `narrow.h`: 64 bytes of inputs of a panel are two tiles side by side, 128 bytes from row to row. Rows
   are copied into tiles, one after the other along the inputs, filled up with what nobody reads. Integers have the sums
   of `narrow.h`, to the bit. Of bfloat16 the processor adds up even inputs of a tile, and odd ones, before both go
   into the sum; that is the same whatever rows are beside. */

#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define TILED                                                                                                          \
    __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma")))
enum { PANEL_BYTES = 2 * TILE_BYTES, TILE_SIZE = TILE_HEIGHT * TILE_BYTES, PANEL_SIZE = 2 * TILE_SIZE };

/* Whether the processor has tiles, and the system lets this process use them. */
static int tiles_(void) {
#if defined(__linux__)
    enum { request_state = 0x1023, tile_data = 18, all = 1 << 22 | 1 << 24 | 1 << 25 };
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all &&
           syscall(SYS_arch_prctl, request_state, tile_data) == 0;
#else
    return 0;
#endif
}

/* All tiles whole. They are let go with `_tile_release`, so that switches between threads do not save them. */
TILED static void take_tiles(void) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = TILE_BYTES, shape.rows[i] = TILE_HEIGHT;
    _tile_loadconfig(&shape);
}

/* Sums in tiles 0 and 1, of a second tile of rows, `next_rows` bytes after the first, in 2 and 3. */
#define ADD_TILES(dot, x, w, two, next_rows)                                                                           \
    _tile_loadd(6, w, PANEL_BYTES);                                                                                    \
    _tile_loadd(7, w + TILE_BYTES, PANEL_BYTES);                                                                       \
    _tile_loadd(4, x, TILE_BYTES);                                                                                     \
    dot(0, 4, 6);                                                                                                      \
    dot(1, 4, 7);                                                                                                      \
    if (two) {                                                                                                         \
        _tile_loadd(5, x + next_rows, TILE_BYTES);                                                                     \
        dot(2, 5, 6);                                                                                                  \
        dot(3, 5, 7);                                                                                                  \
    }
#define CLEAR_TILES(two)                                                                                               \
    _tile_zero(0);                                                                                                     \
    _tile_zero(1);                                                                                                     \
    if (two) {                                                                                                         \
        _tile_zero(2);                                                                                                 \
        _tile_zero(3);                                                                                                 \
    }
/* To `[16 or 32, 32]` of 4 bytes. */
#define STORE_TILES(to, two)                                                                                           \
    _tile_stored(0, to, PANEL_BYTES);                                                                                  \
    _tile_stored(1, (char *)to + TILE_BYTES, PANEL_BYTES);                                                             \
    if (two) {                                                                                                         \
        _tile_stored(2, (char *)to + PANEL_SIZE, PANEL_BYTES);                                                         \
        _tile_stored(3, (char *)to + PANEL_SIZE + TILE_BYTES, PANEL_BYTES);                                            \
    }

INLINE void fetch(const char *next, long bytes) {
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch(next + at, 0, 2);
}

/* ---- bfloat16 ---- */

/* Rows into tiles, items are tiles of rows. */
static void to_tiles(const void *job, long from, long to) {
    const struct halves *in = job;
    long steps = in->pairs * 4 / TILE_BYTES;
    for (long row = from * TILE_HEIGHT; row < to * TILE_HEIGHT; row++) {
        char *tile = (char *)in->copy + row / TILE_HEIGHT * steps * TILE_SIZE + row % TILE_HEIGHT * TILE_BYTES;
        for (long s = 0; s < steps; s++, tile += TILE_SIZE)
            if (row < in->rows) memcpy(tile, (const char *)(in->x + row * in->x_stride) + s * TILE_BYTES, TILE_BYTES);
            else memset(tile, 0, TILE_BYTES);
    }
}

TILED static void panels_tiles(const void *job, long from, long to) {
    const struct halves *in = job;
    long steps = in->pairs * 4 / TILE_BYTES, blocks = (in->rows + 2 * TILE_HEIGHT - 1) / (2 * TILE_HEIGHT);
    long share = PANEL_SIZE / blocks;
    float sum[2 * TILE_HEIGHT * WIDE] __attribute__((aligned(64)));
    take_tiles();
    for (long panel = from; panel < to; panel++) {
        const char *of_panel = (const char *)in->w + panel * steps * PANEL_SIZE, *next = of_panel + steps * PANEL_SIZE;
        long wide = in->outputs - panel * WIDE;
        __mmask16 first = wide >= LANES_ ? 0xffff : (1 << wide) - 1;
        __mmask16 second = wide >= WIDE ? 0xffff : wide > LANES_ ? (1 << (wide - LANES_)) - 1 : 0;
        const float *bias = in->bias + panel * WIDE;
        __m512 low = in->bias ? _mm512_maskz_loadu_ps(first, bias) : _mm512_setzero_ps();
        __m512 high = in->bias ? _mm512_maskz_loadu_ps(second, bias + LANES_) : _mm512_setzero_ps();
        for (long row = 0; row < in->rows; row += 2 * TILE_HEIGHT) {
            const char *x = (const char *)in->copy + row / TILE_HEIGHT * steps * TILE_SIZE, *w = of_panel;
            int two = in->rows - row > TILE_HEIGHT;
            CLEAR_TILES(two)
            for (long s = 0; s < steps; s++, x += TILE_SIZE, w += PANEL_SIZE, next += share) {
                fetch(next, share);
                ADD_TILES(_tile_dpbf16ps, x, w, two, steps * TILE_SIZE)
            }
            STORE_TILES(sum, two)
            for (long i = 0; i < 2 * TILE_HEIGHT && row + i < in->rows; i++) {
                uint16_t *y = in->y + (row + i) * in->outputs + panel * WIDE;
                __m512 found = _mm512_add_ps(_mm512_load_ps(sum + i * WIDE), low);
                _mm256_mask_storeu_epi16(y, first, (__m256i)_mm512_cvtneps_pbh(found));
                found = _mm512_add_ps(_mm512_load_ps(sum + i * WIDE + LANES_), high);
                _mm256_mask_storeu_epi16(y + LANES_, second, (__m256i)_mm512_cvtneps_pbh(found));
            }
        }
    }
    _tile_release();
}

/* ---- Integers ---- */

/* 64 inputs of a panel of 4 bits as those of 8. */
INLINE void to_bytes(const char *w, char *to) {
    __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < TILE_HEIGHT; i++) {
        __m512i both = _mm512_loadu_si512(w + i * TILE_BYTES);
        _mm512_store_si512(to + i * PANEL_BYTES, _mm512_and_si512(both, low));
        _mm512_store_si512(to + i * PANEL_BYTES + TILE_BYTES, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    }
    __asm__ volatile("" : : : "memory"); /* Loads of tiles do not say what they read. */
}

/* One panel for up to two tiles of digits: `sum` is [rows, 32]. */
INLINE void block_integers(const struct integers *in, const char *x, const int32_t *total, const char *w,
                           const uint8_t *zeros, const float *scales, float *sum, const char *next, long share,
                           long rows, const int bits) {
    int32_t part[2 * TILE_HEIGHT * WIDE] __attribute__((aligned(64)));
    char bytes[2][PANEL_SIZE] __attribute__((aligned(64)));
    int two = rows > TILE_HEIGHT;
    long steps = in->stride / TILE_BYTES, s = 0;
    for (long g = 0; g < in->groups; g++) {
        long last = (g + 1) * in->group_size / TILE_BYTES;
        CLEAR_TILES(two)
        for (last = last < steps ? last : steps; s < last; s++, x += TILE_SIZE, w += PANEL_SIZE * bits / 8, next += share) {
            const char *taken = bits == 8 ? w : bytes[s % 2];
            if (bits == 4) to_bytes(w, bytes[s % 2]);
            fetch(next, share);
            ADD_TILES(_tile_dpbsud, x, taken, two, steps * TILE_SIZE)
        }
        STORE_TILES(part, two)
        for (int j = 0; j < 2; j++) {
            __m512i zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)(zeros + g * WIDE + j * LANES_)));
            __m512 scale = _mm512_loadu_ps(scales + g * WIDE + j * LANES_);
            for (long i = 0; i < rows; i++) {
                __m512i off = _mm512_mullo_epi32(zero, _mm512_set1_epi32(total[i * in->groups + g]));
                __m512i less = _mm512_sub_epi32(_mm512_load_si512(part + i * WIDE + j * LANES_), off);
                add_group(sum + i * WIDE + j * LANES_, less, scale, g);
            }
        }
    }
}

TILED static void panels_integers_tiles(const void *job, long from, long to) {
    const struct integers *in = job;
    long rows = in->rows * in->digits, blocks = (rows + 2 * TILE_HEIGHT - 1) / (2 * TILE_HEIGHT);
    long steps = in->stride / TILE_BYTES, size = steps * PANEL_SIZE * in->bits / 8, share = PANEL_SIZE * in->bits / 8 / blocks;
    float sum[ROWS * WIDE];
    take_tiles();
    for (long panel = from; panel < to; panel++) {
        const char *w = (const char *)in->w + panel * size, *next = w + size;
        const uint8_t *zeros = in->zeros + panel * in->groups * WIDE;
        const float *scales = in->scales + panel * in->groups * WIDE;
        for (long row = 0; row < rows; row += 2 * TILE_HEIGHT, next += steps * share) {
            const char *x = (const char *)in->digit + row / TILE_HEIGHT * steps * TILE_SIZE;
            const int32_t *total = in->total + row * in->groups;
            long some = rows - row < 2 * TILE_HEIGHT ? rows - row : 2 * TILE_HEIGHT;
            if (in->bits == 8) block_integers(in, x, total, w, zeros, scales, sum + row * WIDE, next, share, some, 8);
            else block_integers(in, x, total, w, zeros, scales, sum + row * WIDE, next, share, some, 4);
        }
        put_together(in, sum, panel);
    }
    _tile_release();
}
